# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.pipelining``'s schedules as measured systems."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

from wavemare.bench.runner import Place, Runner, bench_device, build_optimizer
from wavemare.bench.workload import Workload

__all__ = ["build_torch_one_f_one_b", "build_zbv"]


class TorchRunner(Runner):
    """A schedule and the optimizer that follows it.

    Args:
        schedule: Made for this rank's stages.
        optimizer: Of their parameters.
        workload: Where the micro-batches come from.
        place: Where this is.
        feeds: Whether this rank holds the beginning of the model.
        judges: Whether it holds the end.
    """

    def __init__(
        self,
        schedule: Any,
        optimizer: torch.optim.Optimizer,
        workload: Workload,
        place: Place,
        *,
        feeds: bool,
        judges: bool,
    ) -> None:
        self._schedule = schedule
        self.optimizer = optimizer
        self._count = place.micro_batches
        self._batches = itertools.cycle(workload.batches)
        self._device = bench_device()
        self._feeds = feeds
        self._judges = judges

    def step(self) -> None:
        """Run the schedule once over a whole batch, and step."""
        pairs = list(itertools.islice(self._batches, self._count))
        inputs, labels = (torch.cat(parts).to(self._device) for parts in zip(*pairs, strict=True))
        self._schedule.step(
            *([inputs] if self._feeds else []),
            target=labels if self._judges else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_torch_one_f_one_b(workload: Workload, place: Place) -> Runner:
    """Return torch's 1F1B, one part on each rank."""
    device = bench_device()
    part = workload.parts(place.stages)[place.rank].to(device)
    stage = PipelineStage(part, place.rank, place.stages, device)
    schedule = Schedule1F1B(stage, place.micro_batches, loss_fn=workload.loss)
    return TorchRunner(
        schedule,
        build_optimizer(part),
        workload,
        place,
        feeds=place.rank == 0,
        judges=place.is_last,
    )


def build_zbv(workload: Workload, place: Place) -> Runner:
    """Return torch's ZBV: rank r holds the parts r and 2P - 1 - r, and rank 0 both ends."""
    device = bench_device()
    count = 2 * place.stages
    parts = workload.parts(count)
    own = {index: parts[index].to(device) for index in (place.rank, count - 1 - place.rank)}
    stages: Any = [PipelineStage(part, index, count, device) for index, part in own.items()]
    schedule = ScheduleZBVZeroBubble(stages, place.micro_batches, loss_fn=workload.loss)
    first = place.rank == 0
    return TorchRunner(
        schedule, build_optimizer(*own.values()), workload, place, feeds=first, judges=first
    )
