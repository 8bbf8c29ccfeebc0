"""What unequal work can gain at most, from measured speeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

__all__ = ["best_cut", "cut_step_s", "fluid_cut_step_s", "share_gain", "stage_seconds"]


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
    """Return a step's seconds: the slowest stage's, and what 1F1B takes to fill and empty."""
    if schedule == "pipemare":
        return micro_batches * max(stage_s)
    return sum(stage_s) + (micro_batches - 1) * max(stage_s)


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
