# SPDX-License-Identifier: Apache-2.0
"""The Trainer's batches as whole optimizer steps, equal on all processes that share a model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["IGNORED", "SeededLoader", "StepFeed", "fill_rows", "seeded"]

IGNORED = -100

_EPOCH_STRIDE = 1_000_003
_RANK_STRIDE = 7_919


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python; restore their states afterwards."""
    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])


class SeededLoader:
    """A loader whose samplers and collators draw the same random numbers on all stages.

    Otherwise stages, whose dropout draws differently, would mask different tokens.

    Args:
        loader: The loader to read; its other attributes are available here.
        seed: Seed of the first batch.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        number = 0
        while True:
            with seeded(self._seed + number):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
            number += 1


@dataclass
class _Step:
    read: list[Any]
    made: list[Any]


class StepFeed:
    """The micro-batches of an epoch, for the Trainer and for an engine that reads ahead.

    Iteration gives the engine's micro-batches: ``micro_batches`` for each step.

    Args:
        source: The Trainer's iterator over an epoch.
        micro_batches: Number per optimizer step; the last step of an epoch may read fewer.
        make: Makes the ``micro_batches`` micro-batches of a step from the batches read for it.
        seed: Seed of the run.
        epoch: Number of the epoch.
        data_rank: Rank among the data ranks.
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        micro_batches: int,
        make: Callable[[list[Any]], list[Any]],
        seed: int,
        epoch: int = 0,
        data_rank: int = 0,
    ) -> None:
        self.source = source
        self._micro_batches = micro_batches
        self._make = make
        self._seed = seed + epoch * _EPOCH_STRIDE
        self._rank_seed = data_rank * _RANK_STRIDE
        self._steps: deque[_Step] = deque()
        self._dropped = self._trained = self._given = self._read = 0

    def next_step(self) -> list[Any]:
        """Return the batches of the Trainer's next step; empty at the end of the epoch."""
        step = self._step(self._trained)
        while self._dropped < self._trained:
            self._steps.popleft()
            self._dropped += 1
        self._trained += 1
        return step.read if step is not None else []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number, place = divmod(self._given, self._micro_batches)
        step = self._step(number)
        if step is None:
            raise StopIteration
        self._given += 1
        return step.made[place]

    def _step(self, number: int) -> _Step | None:
        while self._dropped + len(self._steps) <= number:
            read = [b for _ in range(self._micro_batches) for b in self._next_read()]
            if not read:
                return None
            self._steps.append(_Step(read, self._make(read)))
        return self._steps[number - self._dropped]

    def _next_read(self) -> list[Any]:
        # The first read draws the epoch's order, which all data ranks share.
        with seeded(self._seed + (self._read + self._rank_seed if self._read else 0)):
            self._read += 1
            try:
                return [next(self.source)]
            except StopIteration:
                return []


def fill_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Fill a short batch up with its own rows, whose integer labels become `IGNORED`.

    Args:
        batch: Tensors by name; rows are the first dimension.
        rows: Number of rows to return.
    """
    count = max((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), default=rows)
    if count >= rows:
        return dict(batch)
    index = torch.arange(rows) % count
    full = {
        name: value[index.to(value.device)]
        if isinstance(value, Tensor) and value.ndim and len(value) == count
        else value
        for name, value in batch.items()
    }
    labels = full.get("labels")
    if labels is not None and not labels.is_floating_point():
        labels[count:] = IGNORED
    return full
