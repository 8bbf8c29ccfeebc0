# SPDX-License-Identifier: Apache-2.0
"""What unequal work can gain at most, from measured speeds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.schedules import one_f_one_b

__all__ = ["best_cut", "cut_step_s", "fluid_cut_step_s", "share_gain", "stage_seconds"]

_FORWARD = 1 / 3


def share_gain(seconds: Sequence[float]) -> float:
    """Return how many times as fast shares in proportion to speed are as equal ones.

    ``sum(s) / (N min(s))`` for speeds ``s``; (1 + rho) / 2 for as many fast ranks as slow ones, of
    which the fast are rho times as fast (the Whale design's bound for two types).

    Args:
        seconds: Of each rank for the same work.
    """
    speeds = [1 / spent for spent in seconds]
    return sum(speeds) / (len(speeds) * min(speeds))


def cut_step_s(stage_s: Sequence[float], micro_batches: int, schedule: str) -> float:
    """Return a step's seconds without messages.

    Of 1F1B it is simulated: ``sum(t) + (M - 1) max(t)`` where the last stage is the slowest, and
    less where an earlier one is, which works while the others fill and empty.

    Args:
        stage_s: Of each stage for a micro-batch, a third of it forward.
        micro_batches: Of a step.
        schedule: ``1f1b`` or ``pipemare``, which takes the slowest stage's time for each.
    """
    if schedule == "pipemare":
        return micro_batches * max(stage_s)
    costs = Costs(
        forward_s=tuple(spent * _FORWARD for spent in stage_s),
        backward_s=tuple(spent * (1 - _FORWARD) for spent in stage_s),
    )
    timeline = simulate(_plan(len(stage_s), micro_batches), costs)
    return max(events[-1].end_s for events in timeline.ranks)


@cache
def _plan(stages: int, micro_batches: int) -> Plan:
    return one_f_one_b(stages, micro_batches)


def fluid_cut_step_s(table: Sequence[Sequence[float]], micro_batches: int, schedule: str) -> float:
    """Return a step's seconds if layers could be cut anywhere.

    Args:
        table: (stages, layers): seconds of a micro-batch on each stage's device.
        micro_batches: Of a step.
        schedule: ``1f1b`` or ``pipemare``.
    """
    stage_s = 1 / sum(1 / sum(row) for row in table)
    return cut_step_s([stage_s] * len(table), micro_batches, schedule)


def best_cut(
    table: Sequence[Sequence[float]], micro_batches: int, schedule: str
) -> tuple[tuple[int, ...], float]:
    """Return the bounds of the best of all cuts, and the seconds of its step.

    Args:
        table: (stages, layers): seconds of a micro-batch on each stage's device.
        micro_batches: Of a step.
        schedule: ``1f1b`` or ``pipemare``.
    """
    stages, layers = len(table), len(table[0])
    found = []
    for inner in combinations(range(1, layers), stages - 1):
        bounds = (0, *inner, layers)
        own = stage_seconds(table, bounds)
        found.append((cut_step_s(own, micro_batches, schedule), bounds))
    step_s, bounds = min(found)
    return bounds, step_s


def stage_seconds(table: Sequence[Sequence[float]], bounds: Sequence[int]) -> list[float]:
    """Return each stage's seconds of a micro-batch."""
    spans = zip(table, bounds, bounds[1:], strict=False)
    return [sum(row[first:end]) for row, first, end in spans]
