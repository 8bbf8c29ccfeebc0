# SPDX-License-Identifier: Apache-2.0
"""Measured time of each layer, for cuts by time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray
from torch import Tensor

from wavemare.engine.launch.group import gather
from wavemare.models.activations import Activations, pack, split_batch, unpack
from wavemare.models.families import Loss, family_of
from wavemare.models.layers import PipelineLayer, TiedHead
from wavemare.models.proof import example_batch, example_labels, keeping_state

_TOKENS = 128
_ROUNDS = 3


def layer_times(model: Any, chain: Sequence[PipelineLayer], inputs: Sequence[str]) -> list[float]:
    """Measure forward and backward of each layer on one text, averaged over all processes.

    Layers of the same kind and size share their mean, so that noise does not move the cuts.

    Args:
        model: The model that the layers belong to.
        chain: Its layers.
        inputs: The declared names.

    Returns:
        Seconds for each layer, equal on all ranks.
    """
    own = _mean_by_kind(chain, _own_times(model, chain, inputs, texts=1, tokens=_TOKENS))
    return [float(value) for value in np.mean(gather(own), axis=0)]


def rank_times(
    model: Any,
    *,
    samples: int,
    sequence_length: int,
    inputs: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> NDArray[np.float64]:
    """Measure forward and backward of each layer on every rank, all at the same time.

    Args:
        model: Whole on every rank.
        samples: Of a micro-batch.
        sequence_length: Tokens of a sample.
        inputs: Names of the tensors that enter the first layer; the family's default if omitted.
        dtype: Of autocast, for a job that computes in 16 bits.

    Returns:
        Seconds, (ranks, layers), equal on all ranks; the loss is part of the last layer.
    """
    family = family_of(model)
    names = family.declared(inputs)
    chain, loss = tuple(family.chain(model, names)), family.loss(model)
    torch.distributed.barrier()
    with torch.autocast(get_accelerator().device_name(), dtype, enabled=dtype is not None):
        own = _own_times(model, chain, names, loss, texts=samples, tokens=sequence_length)
    return np.array(gather(_mean_by_kind(chain, own)))


def _own_times(
    model: Any,
    chain: Sequence[PipelineLayer],
    inputs: Sequence[str],
    loss: Loss | None = None,
    *,
    texts: int,
    tokens: int,
) -> list[float]:
    batch = example_batch(model, inputs, texts=texts, tokens=tokens)
    activations: Any = split_batch(batch, inputs, labels_required=False)[0]
    device = torch.device(get_accelerator().current_device_name())
    seconds = []
    with keeping_state(model):
        for layer in chain:
            end: Callable[[Tensor], Tensor] = torch.sum
            if loss is not None and layer is chain[-1]:
                labels = example_labels(loss, batch["input_ids"]).to(device)
                end = partial(_loss_of, loss, labels)
            activations, spent = _measure(layer, activations, device, end)
            seconds.append(spent)
    return seconds


def _loss_of(loss: Loss, labels: Tensor, logits: Tensor) -> Tensor:
    return loss(logits, labels)


def _measure(
    layer: PipelineLayer,
    activations: Activations,
    device: torch.device,
    end: Callable[[Tensor], Tensor],
) -> tuple[Activations, float]:
    module = layer.tied if isinstance(layer, TiedHead) else layer
    home = next((weight.device for weight in module.parameters()), device)
    for part in {layer, module}:
        part.to(device)
    weights = [w for w in {*layer.parameters(), *module.parameters()} if w.requires_grad]
    first, sides = unpack(activations, layer.inputs)
    sides = {name: side.to(device) for name, side in sides.items()}
    spent = []
    # The first round warms up.
    for _ in range(_ROUNDS + 1):
        hidden = first.detach().to(device)
        leaves: list[Tensor] = list(weights)
        if hidden.is_floating_point():
            leaves.append(hidden.requires_grad_())
        started = device_time()
        with torch.enable_grad():
            result = layer(pack(hidden, sides))
            output, *others = (result,) if isinstance(result, Tensor) else result
            if leaves and output.requires_grad:
                # Not backward(), which would leave gradients in the parameters.
                torch.autograd.grad(end(output), leaves, allow_unused=True)
        spent.append(device_time() - started)
    for part in {layer, module}:
        part.to(home)
    return (output.detach(), *others) if others else output.detach(), median(spent[1:])


def device_time() -> float:
    """Return seconds of a clock, read when the device has done its work."""
    get_accelerator().synchronize()
    return time.perf_counter()


def _mean_by_kind(chain: Sequence[PipelineLayer], seconds: Sequence[float]) -> list[float]:
    def kind(layer: PipelineLayer) -> tuple[type, int]:
        return type(layer), sum(weight.numel() for weight in layer.parameters())

    alike: dict[tuple[type, int], list[float]] = {}
    for layer, spent in zip(chain, seconds, strict=True):
        alike.setdefault(kind(layer), []).append(spent)
    return [sum(alike[kind(layer)]) / len(alike[kind(layer)]) for layer in chain]
