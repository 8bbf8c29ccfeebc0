# SPDX-License-Identifier: Apache-2.0
"""Trying what a plan is worth: some steps with its shares, as many with equal ones."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator
from torch import distributed as dist

from wavemare.parallel.guard import STEPS, Guard

__all__ = ["Trial", "TrialVerdict"]

_WARMUPS = 4
"""Steps after a change of shares that do not count."""


class TrialVerdict(NamedTuple):
    """What a step took on the slowest rank.

    Args:
        planned_s: With the planned shares, seconds; a median, as the next.
        equal_s: With equal shares.
        shares: Those that stay.
    """

    planned_s: float
    equal_s: float
    shares: tuple[int, ...]

    def __str__(self) -> str:
        kept = "the plan's" if self.planned_s <= self.equal_s else "equal"
        return (
            f"a step took {self.planned_s * 1e3:.3g} ms with the plan's shares and "
            f"{self.equal_s * 1e3:.3g} ms with equal ones; {kept} stay: "
            + ", ".join(map(str, self.shares))
        )


class Trial:
    """Times 20 steps with the planned shares and 20 with equal ones, and keeps the faster.

    Losses are weighted, so all steps learn from the same samples. All ranks must call it alike,
    `after_step` after the guard's, which may have mended the plan at the 20th step.

    Args:
        guard: Of the engine, built with the planned shares.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._planned = guard.shares
        self._seconds: list[float] = []
        self._planned_s = 0.0
        self._tries_equal = False
        self._ended = len(set(guard.shares)) == 1 or sum(guard.shares) % len(guard.shares) > 0
        self._started = _now()

    def after_step(self) -> TrialVerdict | None:
        """Count an optimizer step; return the verdict when both have been tried."""
        if self._ended:
            return None
        ended = _now()
        self._seconds.append(ended - self._started)
        self._started = ended
        if len(self._seconds) < STEPS:
            return None
        seconds = _slowest(median(self._seconds[_WARMUPS:]))
        self._seconds.clear()
        if not self._tries_equal:
            self._planned, self._planned_s = self._guard.shares, seconds
            self._tries_equal = True
            ranks = len(self._planned)
            self._guard.apply((sum(self._planned) // ranks,) * ranks)
            self._started = _now()
            return None
        self._ended = True
        if self._planned_s <= seconds:
            self._guard.apply(self._planned)
        return TrialVerdict(self._planned_s, seconds, self._guard.shares)


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


def _slowest(seconds: float) -> float:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return float(max(found))
