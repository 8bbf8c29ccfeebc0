# SPDX-License-Identifier: Apache-2.0
"""When each action of a plan ran: simulated from costs, or measured in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, Action, Kind

__all__ = ["Event", "Timeline", "bubble", "steady_utilisation", "utilisation"]

_BUSY = COMPUTE | {Kind.STEP}


class Event(NamedTuple):
    """An action and when it ran.

    Args:
        action: What was done.
        start_s: Seconds since the timeline's beginning.
        end_s: The same.
    """

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The events of every rank, in the order in which they began.

    Args:
        title: What is shown: a schedule's name, "simulated" or "measured".
        ranks: For each rank its events. A rank is idle, or waits for a message, in between; a
            receive's event ends when the message is there and may begin long before.
    """

    title: str
    ranks: tuple[tuple[Event, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first event to the end of the last."""
        starts = [events[0].start_s for events in self.ranks if events]
        ends = [max(event.end_s for event in events) for events in self.ranks if events]
        return max(ends) - min(starts) if ends else 0.0

    @property
    def collectives_s(self) -> float:
        """Seconds of all ranks' collectives."""
        events = (event for rank in self.ranks for event in rank)
        return sum(e.end_s - e.start_s for e in events if e.action.kind in COLLECTIVES)

    @property
    def exposed_s(self) -> float:
        """Seconds in which a rank's collectives run and nothing else does, summed over ranks."""
        return sum(map(_exposed_s, self.ranks))

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank computed: forward and backward passes and optimizer steps."""
        return sum(e.end_s - e.start_s for e in self.ranks[rank] if e.action.kind in _BUSY)


def _exposed_s(events: Iterable[Event]) -> float:
    """Return how long collectives run alone; neither they nor other events overlap each other."""
    collectives: list[Event] = []
    others: list[Event] = []
    for event in events:
        (collectives if event.action.kind in COLLECTIVES else others).append(event)
    exposed_s = 0.0
    first = 0
    for _, start_s, end_s in collectives:
        exposed_s += end_s - start_s
        while first < len(others) and others[first].end_s <= start_s:
            first += 1
        for other in others[first:]:
            if other.start_s >= end_s:
                break
            exposed_s -= max(0.0, min(other.end_s, end_s) - max(other.start_s, start_s))
    return exposed_s


def utilisation(timeline: Timeline) -> tuple[float, ...]:
    """Return for each rank the share of the whole time in which it computes, 0 to 1."""
    whole = timeline.makespan_s
    ranks = range(len(timeline.ranks))
    return tuple(timeline.busy_s(rank) / whole if whole else 0.0 for rank in ranks)


def bubble(timeline: Timeline) -> float:
    """Return the share of all ranks' time in which nothing is computed, 0 to 1."""
    shares = utilisation(timeline)
    return 1 - sum(shares) / len(shares) if shares else 0.0


def steady_utilisation(timeline: Timeline) -> tuple[float, ...] | None:
    """Return for each rank the share of the steady state in which it computes, 0 to 1.

    The steady state begins when the last rank begins its first backward pass (forward pass, where a
    rank has no backward pass) and ends when the first rank has ended its last forward pass.

    Returns:
        None if the timeline has no steady state.
    """
    starts, ends = [], []
    for events in timeline.ranks:
        begin = _first(Kind.BACKWARD, events) or _first(Kind.FORWARD, events)
        last = _first(Kind.FORWARD, reversed(events))
        if begin is None or last is None:
            return None
        starts.append(begin.start_s)
        ends.append(last.end_s)
    start, end = max(starts, default=0.0), min(ends, default=0.0)
    if end <= start:
        return None
    return tuple(
        sum(
            max(0.0, min(event.end_s, end) - max(event.start_s, start))
            for event in events
            if event.action.kind in _BUSY
        )
        / (end - start)
        for events in timeline.ranks
    )


def _first(kind: Kind, events: Iterable[Event]) -> Event | None:
    return next((event for event in events if event.action.kind is kind), None)
