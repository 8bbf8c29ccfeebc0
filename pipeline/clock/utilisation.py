# SPDX-License-Identifier: Apache-2.0
"""How busy the ranks of a timeline are."""

from __future__ import annotations

from collections.abc import Iterable

from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.plan.action import COMPUTE, Kind

__all__ = ["bubble", "steady_utilisation", "steady_window", "utilisation"]

_BUSY = COMPUTE | {Kind.STEP}


def utilisation(timeline: Timeline) -> tuple[float, ...]:
    """Return for each rank the share of the whole time in which it computes, 0 to 1."""
    whole = timeline.makespan_s
    ranks = range(len(timeline.ranks))
    return tuple(timeline.busy_s(rank) / whole if whole else 0.0 for rank in ranks)


def bubble(timeline: Timeline) -> float:
    """Return the share of all ranks' time in which nothing is computed, 0 to 1."""
    shares = utilisation(timeline)
    return 1 - sum(shares) / len(shares) if shares else 0.0


def steady_window(timeline: Timeline) -> tuple[float, float] | None:
    """Return start and end of the steady state, between the first fill and the last drain.

    It begins when the last rank begins its first backward pass (forward pass, where a rank has no
    backward pass) and ends when the first rank has ended its last forward pass.

    Returns:
        Seconds of the timeline; None if it is too short to have a steady state.
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
    return (start, end) if end > start else None


def steady_utilisation(timeline: Timeline) -> tuple[float, ...] | None:
    """Return for each rank the share of the steady state in which it computes, 0 to 1.

    Returns:
        None if the timeline has no steady state.
    """
    window = steady_window(timeline)
    if window is None:
        return None
    start, end = window
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
