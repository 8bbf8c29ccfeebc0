# SPDX-License-Identifier: Apache-2.0
"""The table of schedules: one row says all that the rest of the code asks about a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wavemare.errors import PlanError, did_you_mean
from wavemare.pipeline.plan import orders
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

CHUNKS = 2
"""Stages per rank of an interleaved schedule, if nothing else is given."""


def _one_each(num_ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(num_ranks))


def _vee(num_ranks: int, chunks: int) -> tuple[int, ...]:
    return orders.vee(num_ranks)


def _on_one_rank(num_segments: int, chunks: int) -> tuple[int, ...]:
    return (0,) * num_segments


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule.

    Args:
        make: Makes a plan of (length of the pipeline in ranks, micro-batches per step, steps) and
            the options. The length of waves is the number of segments.
        homes: For (length, chunks) the rank of each stage.
        options: Names of ``make``'s options.
        trains: Whether engines train with it.
        splits: Whether it splits backward passes.
        flushes: Whether it empties the pipeline at each optimizer step.
        is_waves: Whether its stages are the segments of a model that is whole on one rank.
    """

    make: Callable[..., Plan]
    homes: Callable[[int, int], tuple[int, ...]] = _one_each
    options: tuple[str, ...] = ()
    trains: bool = False
    splits: bool = False
    flushes: bool = True
    is_waves: bool = False


_SUMS = "sums_output", "sums_gradient"

SCHEDULES: dict[str, ScheduleRow] = {
    "1f1b": ScheduleRow(orders.one_f_one_b, options=("slack",), trains=True),
    "zb-h1": ScheduleRow(orders.zb_h1, trains=True, splits=True),
    "interleaved": ScheduleRow(orders.interleaved, orders.loop, ("chunks",), trains=True),
    "zbv": ScheduleRow(orders.zbv, _vee, trains=True, splits=True),
    "auto": ScheduleRow(automatic, _vee, ("costs", "memory_limit"), trains=True, splits=True),
    "pipemare": ScheduleRow(
        orders.pipemare,
        options=("warmup_steps", "drain_interval", "slack", "norms", "correct"),
        trains=True,
        flushes=False,
    ),
    "inference": ScheduleRow(orders.inference),
    "accumulation": ScheduleRow(accumulation, _on_one_rank, is_waves=True),
    "in-phase": ScheduleRow(in_phase, _on_one_rank, _SUMS, is_waves=True),
    "tick-tock": ScheduleRow(tick_tock, _on_one_rank, _SUMS, is_waves=True),
}
"""By the name that configuration and command line take."""

TRAINED: tuple[str, ...] = tuple(name for name, row in SCHEDULES.items() if row.trains)
"""The schedules that engines train with."""


def build_plan(
    schedule: str, num_ranks: int, micro_batches: int, num_steps: int, **options: Any
) -> Plan:
    """Return a plan by the name of its schedule.

    Args:
        schedule: One of `SCHEDULES`.
        num_ranks: Length of the pipeline; segments of waves.
        micro_batches: Per optimizer step.
        num_steps: Optimizer steps of the plan.
        **options: Those of the schedule's row.

    Raises:
        PlanError: There is no such schedule, or a number is out of range.
    """
    if schedule not in SCHEDULES:
        reason = "there is no such schedule"
        raise PlanError("schedule", schedule, reason, did_you_mean(schedule, SCHEDULES))
    if not num_steps and schedule != "inference":
        raise PlanError("steps", num_steps, "only inference has none", "Give 1 or more")
    return SCHEDULES[schedule].make(num_ranks, micro_batches, num_steps, **options)
