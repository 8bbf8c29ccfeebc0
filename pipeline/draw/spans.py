# SPDX-License-Identifier: Apache-2.0
"""The lanes of a Gantt chart: spans of time and their kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.plan.action import COLLECTIVES, COMPUTE, Kind

__all__ = [
    "COLOURS",
    "STEP",
    "WAITING",
    "Span",
    "busy_spans",
    "collective_spans",
    "lanes",
    "waiting_spans",
]

STEP, WAITING = "optimizer step", "waiting for messages"

# Colours of Okabe and Ito, which people with any colour vision tell apart; blue, green and orange
# differ in lightness as well.
COLOURS = {
    WAITING: "#f1f1f3",
    "forward": "#0072b2",
    "backward": "#f0a830",
    STEP: "#1f2328",
    "weight correction": "#009e73",
    "collective": "#cc79a7",
}
"""Colours by the kind that the legend names, in drawing order."""

_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.STEP: STEP,
    Kind.CORRECT: "weight correction",
    Kind.RESTORE: "weight correction",
}


class Span(NamedTuple):
    """A stretch of time of one colour.

    Args:
        start_s: Start, in seconds since the timeline's beginning.
        end_s: End, likewise.
        kind: A key of `COLOURS`.
        label: Text to write inside if there is room.
    """

    start_s: float
    end_s: float
    kind: str
    label: str = ""


def busy_spans(events: Iterable[Event]) -> list[Span]:
    """Return passes, optimizer steps and weight corrections, in the order of their starts."""
    spans = []
    for action, start_s, end_s in events:
        kind = _KINDS.get(action.kind)
        if kind is not None:
            label = str(action.micro_batch) if action.kind in COMPUTE else ""
            spans.append(Span(start_s, end_s, kind, label))
    return sorted(spans)


def lanes(timeline: Timeline) -> list[tuple[str, list[Span]]]:
    """Return the names and spans of a timeline's lanes, from top to bottom.

    Each rank has one, and below it one for its collectives if it has any.
    """
    rows = []
    for rank, events in enumerate(timeline.ranks):
        rows.append((f"rank {rank}", [*waiting_spans(events), *busy_spans(events)]))
        if collectives := collective_spans(events):
            rows.append(("sums", collectives))
    return rows


def collective_spans(events: Iterable[Event]) -> list[Span]:
    """Return the collectives that run beside a rank's passes, in the order of their starts."""
    return sorted(
        Span(start_s, end_s, "collective", str(action.micro_batch))
        for action, start_s, end_s in events
        if action.kind in COLLECTIVES
    )


def waiting_spans(events: Iterable[Event]) -> Iterator[Span]:
    """Return when a rank waited for messages or data and computed nothing.

    A receive may be posted long before its data is needed; time in which the rank computes does
    not count as waiting.
    """
    edges = []
    for action, start_s, end_s in events:
        busy = action.kind in _KINDS
        edges += [(start_s, busy, 1), (end_s, busy, -1)]
    pending = {True: 0, False: 0}
    since: float | None = None
    for time, changes in groupby(sorted(edges), key=itemgetter(0)):
        for _, busy, change in changes:
            pending[busy] += change
        waits = pending[False] > 0 and not pending[True]
        if waits and since is None:
            since = time
        elif not waits and since is not None:
            yield Span(since, time, WAITING)
            since = None
