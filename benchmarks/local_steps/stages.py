# SPDX-License-Identifier: Apache-2.0
"""Replicas of ``benchmarks local-steps --stages``: pipelines, stock DeepSpeed's or ours."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn

import wavemare
from benchmarks.device_like import SleepingPass
from benchmarks.local_steps.request import LocalStepsRequest
from benchmarks.request import Waits
from benchmarks.sparse.step import EngineSystem
from wavemare.models.chains import gpt2_chain
from wavemare.models.convert import cut_chain
from wavemare.models.families import LanguageModelLoss

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

INPUTS = ("input_ids",)
PARTITION = "compute"
"""Where the model is cut, in all systems: ids are looked up, which takes no time."""


class PipelineSystem(EngineSystem):
    """A pipeline of DeepSpeed, or of ours.

    Args:
        engine: Complete.
        request: The options.
    """

    def __init__(self, engine: Any, request: LocalStepsRequest) -> None:
        super().__init__(engine)
        self._micro_batches = request.step_micro_batches

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do an optimizer step with the rows of all micro-batches; return the replica's loss."""
        parts = [batch[name].chunk(self._micro_batches) for name in (*INPUTS, "labels")]
        loss: Tensor = self._engine.train_batch(zip(*parts, strict=True))
        return loss.detach()


def put_layers_to_sleep(model: Any, waits: Waits) -> None:
    """Replace a GPT's blocks, norm and head by layers that sleep, and its loss by a mean.

    The head returns what it gets. Embeddings are looked up. Every weight of a layer that sleeps has
    the gradient 1.

    Args:
        model: Keeps its modules and its weights.
        waits: Of the whole model; layers share them by their numbers of weights.
    """
    layers = [*model.transformer.h, model.transformer.ln_f, model.lm_head]
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    for layer, size in zip(layers, sizes, strict=True):
        layer.forward = partial(_sleep, layer, waits.share(size / sum(sizes)))
    model.loss_function = _mean


def _sleep(layer: nn.Module, waits: Waits, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    passed: Tensor = SleepingPass.apply(hidden, waits, 1.0, *layer.parameters())
    return passed


def _mean(logits: Tensor, **_: Any) -> Tensor:
    return logits.mean()


def stock_pipeline(
    model: Any, request: LocalStepsRequest, config: dict[str, Any], make: Make
) -> Any:
    """Return stock DeepSpeed's engine of a pipeline on each host.

    By default DeepSpeed puts the ranks of one stage side by side, so that pipelines cross links.

    Args:
        model: A GPT, the same on all ranks.
        request: The options.
        config: Of DeepSpeed.
        make: Makes the optimizer of a stage.
    """
    chain, stages = gpt2_chain(model, INPUTS), request.stages
    cuts = cut_chain(model, chain, INPUTS, PARTITION, range(stages))
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints its topology
        module = PipelineModule(
            [nn.Sequential(*chain[begin:end]) for begin, end in pairwise(cuts)],
            topology=ProcessTopology(["data", "pipe"], [request.ranks // stages, stages]),
            loss_fn=LanguageModelLoss(model.loss_function, request.vocabulary),
            partition_method="uniform",  # one part for each stage
        )
    optimizer = make(module.parameters())
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def replica_pipeline(
    model: Any,
    request: LocalStepsRequest,
    config: dict[str, Any],
    make: Make,
    section: dict[str, Any],
) -> Any:
    """Return our engine, whose pipeline on each host is a replica; see `stock_pipeline`.

    Args:
        model: A GPT, the same on all ranks.
        request: The options.
        config: Of DeepSpeed.
        make: Makes an optimizer.
        section: ``wavemare.local_steps``.
    """
    pipeline = {"stages": request.stages, "partition": PARTITION, "inputs": list(INPUTS)}
    config = {**config, "wavemare": {"pipeline": pipeline, "local_steps": section}}
    optimizer = make(model.parameters())
    return wavemare.initialize(model=model, optimizer=optimizer, config=config)[0]
