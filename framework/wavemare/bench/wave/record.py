# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: in passes, in waiting for collectives, and when these really ended."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from torch import Tensor

from wavemare.engine.waves.executor import WaveExecutor
from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import COLLECTIVES, COMPUTE, Action, Kind

__all__ = ["COST_KINDS", "StepRecorder", "WatchingExecutor", "median_seconds"]

COST_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.SUM_OUTPUT, Kind.SUM_GRADIENT)
"""What each segment does, as far as it takes time."""


class StepRecorder:
    """Notes the passes of a step, and the waits for collectives between them.

    Args:
        clock: Seconds from any origin, never going back.

    Attributes:
        events: In their order; those of collectives are the waits for them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.events: list[Event] = []

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Note what is done inside."""
        started = self._clock()
        yield
        self.events.append(Event(action, started, self._clock()))

    @property
    def compute_s(self) -> float:
        """Seconds in passes."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COMPUTE)

    @property
    def waiting_s(self) -> float:
        """Seconds in which nothing but collectives ran."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COLLECTIVES)


class WatchingExecutor(WaveExecutor):
    """Notes from when to when collectives run, hidden or not. That takes time of its own.

    Attributes:
        sums: In the order of their ends, by `time.perf_counter`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sums: list[Event] = []

    def _sum(self, action: Action, wave: Any, tensor: Tensor | None) -> None:
        started = time.perf_counter()
        super()._sum(action, wave, tensor)

        def note(_: Any) -> None:  # called by gloo's thread, as soon as the sum is there
            self.sums.append(Event(action, started, time.perf_counter()))

        wave.work.get_future().add_done_callback(note)


def median_seconds(events: Iterable[Event], num_segments: int) -> list[list[float]]:
    """Return for each of `COST_KINDS` the median times of all segments; 0 for what was not done.

    Args:
        events: Of steps in which each collective is waited for at once.
        num_segments: With the head.
    """
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, start_s, end_s in events:
        seconds[action.kind, action.stage].append(end_s - start_s)
    return [
        [median(seconds.get((kind, stage), [0.0])) for stage in range(num_segments)]
        for kind in COST_KINDS
    ]
