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
from deepspeed.runtime.pipe import p2p
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
        number: Of this rank's pipeline.
    """

    def __init__(self, engine: Any, request: LocalStepsRequest, number: int) -> None:
        super().__init__(engine)
        self._request, self._number = request, number

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do an optimizer step with this pipeline's part of the rows; return its loss."""
        pipelines = _pipelines(self._request)
        own = [batch[name].chunk(pipelines)[self._number] for name in (*INPUTS, "labels")]
        parts = [rows.chunk(self._request.step_micro_batches) for rows in own]
        p2p.init_process_groups(self._engine.grid)  # DeepSpeed knows that of the last engine alone
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


def _mean(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.mean()


def stock_pipeline(
    model: Any, request: LocalStepsRequest, config: dict[str, Any], make: Make, *, across: bool
) -> PipelineSystem:
    """Build stock DeepSpeed's engine.

    Args:
        model: A GPT, the same on all ranks.
        request: The options.
        config: Of DeepSpeed.
        make: Makes the optimizer of a stage.
        across: Whether to leave the placement to DeepSpeed, which puts the ranks of one stage side
            by side, so that pipelines cross the links; else each host has a pipeline.
    """
    chain, stages, pipelines = gpt2_chain(model, INPUTS), request.stages, _pipelines(request)
    cuts = cut_chain(model, chain, INPUTS, PARTITION, range(stages))
    within = ProcessTopology(["data", "pipe"], [pipelines, stages])
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints its topology
        module = PipelineModule(
            [nn.Sequential(*chain[begin:end]) for begin, end in pairwise(cuts)],
            num_stages=stages,
            topology=None if across else within,
            loss_fn=LanguageModelLoss(model.loss_function, request.vocabulary),
            partition_method="uniform",  # one part for each stage
        )
    optimizer = make(module.parameters())
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    return PipelineSystem(engine, request, engine.grid.get_data_parallel_id())


def replica_pipeline(
    model: Any,
    request: LocalStepsRequest,
    config: dict[str, Any],
    make: Make,
    section: dict[str, Any],
) -> tuple[PipelineSystem, Any]:
    """Build our engine, whose pipeline on each host is a replica; return it with its engine.

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
    engine: Any = wavemare.initialize(model=model, optimizer=optimizer, config=config)[0]
    return PipelineSystem(engine, request, engine.replica), engine


def _pipelines(request: LocalStepsRequest) -> int:
    return request.ranks // request.stages
