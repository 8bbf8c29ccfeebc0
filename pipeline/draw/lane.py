# SPDX-License-Identifier: Apache-2.0
"""The lanes of a Gantt chart: which spans of time are which colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.draw.picture import Paint
from wavemare.pipeline.plan.action import COLLECTIVES, Kind

__all__ = [
    "PAINTS",
    "STEP",
    "WAITING",
    "Span",
    "busy_spans",
    "collective_spans",
    "lanes",
    "waiting_spans",
]

# Colours of Okabe and Ito, which people with any colour vision tell apart; blue, green and orange
# differ in lightness as well.
_FORWARD = Paint("forward", "#0072b2")
_BACKWARD = Paint("backward", "#f0a830", text="#1f2328")
STEP = Paint("optimizer step", "#1f2328")
_WEIGHTS = Paint("weight correction", "#009e73")
_COLLECTIVE = Paint("collective", "#cc79a7", text="#1f2328")
WAITING = Paint("waiting for messages", "#f1f1f3", hatch="#c4c6cc")

_PAINTS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.STEP: STEP,
    Kind.CORRECT: _WEIGHTS,
    Kind.RESTORE: _WEIGHTS,
}
PAINTS = (_FORWARD, _BACKWARD, STEP, _WEIGHTS, _COLLECTIVE, WAITING)
"""In the order of the legend."""


class Span(NamedTuple):
    """A stretch of time of one colour.

    Args:
        start_s: Seconds since the timeline's beginning.
        end_s: The same.
        paint: Its colour.
        label: What to write inside if there is room.
        hint: What happens there.
    """

    start_s: float
    end_s: float
    paint: Paint
    label: str = ""
    hint: str = ""


def busy_spans(events: Iterable[Event]) -> list[Span]:
    """Return passes, optimizer steps and weight corrections, in the order of their starts."""
    spans = []
    for action, start_s, end_s in events:
        paint = _PAINTS.get(action.kind)
        if paint is not None:
            label = str(action.micro_batch) if paint in {_FORWARD, _BACKWARD} else ""
            spans.append(Span(start_s, end_s, paint, label, str(action)))
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
        Span(start_s, end_s, _COLLECTIVE, str(action.micro_batch), str(action))
        for action, start_s, end_s in events
        if action.kind in COLLECTIVES
    )


def waiting_spans(events: Iterable[Event]) -> Iterator[Span]:
    """Return when messages or data were under way and the rank did nothing else.

    A receive may have been posted long before the rank needed it: what it computed meanwhile is
    cut out.
    """
    edges = []
    for action, start_s, end_s in events:
        busy = action.kind in _PAINTS
        edges += [(start_s, busy, 1), (end_s, busy, -1)]
    under_way = {True: 0, False: 0}
    since: float | None = None
    for time, changes in groupby(sorted(edges), key=itemgetter(0)):
        for _, busy, change in changes:
            under_way[busy] += change
        waits = under_way[False] > 0 and not under_way[True]
        if waits and since is None:
            since = time
        elif not waits and since is not None:
            yield Span(since, time, WAITING)
            since = None
