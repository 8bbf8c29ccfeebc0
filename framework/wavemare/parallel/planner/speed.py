# SPDX-License-Identifier: Apache-2.0
"""How fast each rank trains a model: two measured sizes of micro-batch make a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch import distributed as dist

from wavemare.models.proof import random_state

__all__ = ["Line", "example_samples", "measure_speeds"]

_WARMUPS = 4
"""Passes after a change of the batch size that take up to half as long again, seen on CPUs."""
_ROUNDS = 8
_LIMIT_S = 15.0


class Line(NamedTuple):
    """Seconds that grow with the number of samples.

    Args:
        fixed_s: Seconds however few samples there are.
        sample_s: Seconds of each sample.
    """

    fixed_s: float
    sample_s: float

    def seconds(self, samples: int) -> float:
        """Return the seconds of so many samples."""
        return self.fixed_s + samples * self.sample_s


def measure_speeds(
    model: Any,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    sizes: tuple[int, int],
    *,
    dtype: torch.dtype | None = None,
) -> list[Line]:
    """Measure forward and backward passes of a model on every rank, all at the same time.

    Neither weights, gradients nor random state are changed. The model is moved to the device.

    Args:
        model: Returns an output with ``.loss``; equal on all ranks.
        batch_of: From a number of samples to a batch.
        sizes: A small and a larger micro-batch, in samples; it may take up to 15 s to measure.
        dtype: Of autocast, for a job that computes in 16 bits; None for that of the weights.

    Returns:
        For each rank the seconds of forward and backward pass by the number of samples, from
        medians of eight rounds, fewer of slow ones.
    """
    device = torch.device(get_accelerator().current_device_name())
    model.to(device)
    training, restore = model.training, random_state(device)
    model.train()
    try:
        # The larger one first: allocators keep what it needs.
        points = [_measure(model, batch_of(size), device, dtype) for size in reversed(sizes)]
    finally:
        model.train(training)
        restore()
    large, small = points
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, _line(sizes, small, large))
    return lines


def example_samples(model: Any, sequence_length: int, samples: int) -> dict[str, Tensor]:
    """Return a batch of so many samples for a transformers model with a head.

    Labels are the tokens, or zeros for a classifier.

    Args:
        model: Whose configuration says which labels it takes.
        sequence_length: Tokens of a sample.
        samples: Their number.
    """
    vocabulary = model.config.vocab_size
    tokens = (torch.arange(samples * sequence_length) * 7 + 3) % vocabulary
    tokens = tokens.view(samples, sequence_length)
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    labels = torch.zeros(samples, dtype=torch.long) if classifies else tokens
    return {"input_ids": tokens, "labels": labels}


def _measure(
    model: Any, batch: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype | None
) -> float:
    batch = {name: value.to(device) for name, value in batch.items()}
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    whole = []
    deadline = time.perf_counter() + _LIMIT_S / 2
    for _ in range(_WARMUPS + _ROUNDS):
        dist.barrier()  # unlike programs on one machine disturb each other as they will later
        started = _now()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = model(**batch).loss
        # Not backward(), which would leave gradients in the parameters.
        torch.autograd.grad(loss, weights, allow_unused=True)
        ended = _now()
        whole.append(ended - started)
        if _any_rank(ended > deadline, device) and len(whole) > 1:
            break
    warm = min(_WARMUPS, len(whole) // 2)
    return median(whole[warm:])


def _line(sizes: Sequence[int], small_s: float, large_s: float) -> Line:
    small, large = sizes
    if large == small:
        return Line(0.0, large_s / large)
    slope = (large_s - small_s) / (large - small)
    # Noise must not make more samples free, nor a fixed cost negative.
    slope = min(max(slope, 0.1 * large_s / large), large_s / large)
    return Line(large_s - slope * large, slope)


def _any_rank(condition: bool, device: torch.device) -> bool:
    verdict = torch.tensor(int(condition), device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    return bool(verdict)


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()
