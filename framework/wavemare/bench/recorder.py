# SPDX-License-Identifier: Apache-2.0
"""When each action ran on this rank, noted around the functions that do it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import COMPUTE, RECEIVES, SENDS, Action, Kind

__all__ = ["Busy", "EventSource", "Recorder", "busy_seconds"]

_MESSAGES = frozenset(RECEIVES) | frozenset(SENDS)


class EventSource(Protocol):
    """Whatever can tell which actions ran."""

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        ...


class Busy(NamedTuple):
    """Where a rank's time went, in seconds.

    Args:
        compute_s: In forward and backward passes.
        step_s: In the optimizer.
        message_s: In sends and receives.
    """

    compute_s: float
    step_s: float
    message_s: float


class Recorder:
    """Collects events until they are taken.

    Times are `time.perf_counter`'s, which all processes of a Linux host share.

    Args:
        micro_batches: Per optimizer step.
        clock: Seconds from any origin, never going back.
    """

    def __init__(self, micro_batches: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._micro_batches = micro_batches
        self._clock = clock
        self._counts: Counter[tuple[Kind, int]] = Counter()
        self._events: list[Event] = []

    def timed(self, kind: Kind, stage: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is noted.

        Actions do not name their micro-batch in all systems: the n-th action of a kind and stage is
        taken for that of micro-batch n, or of step n.

        Args:
            kind: What it does.
            stage: For which stage.
            function: What to call.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            started = self._clock()
            result = function(*args, **kwargs)
            self.note(kind, stage, started)
            return result

        return call

    def note(self, kind: Kind, stage: int, started: float) -> None:
        """Note that an action that began at a time has ended now."""
        number = self._counts[kind, stage]
        self._counts[kind, stage] += 1
        if kind in (Kind.STEP, Kind.REDUCE):
            number = (number + 1) * self._micro_batches - 1
        self._events.append(Event(Action(kind, stage, number), started, self._clock()))

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def busy_seconds(events: Iterable[Event]) -> Busy:
    """Add up the times of actions; none of them overlap on a rank."""
    totals = dict.fromkeys(Kind, 0.0)
    for event in events:
        totals[event.action.kind] += event.end_s - event.start_s
    return Busy(
        compute_s=sum(totals[kind] for kind in COMPUTE),
        step_s=totals[Kind.STEP],
        message_s=sum(totals[kind] for kind in _MESSAGES),
    )
