# SPDX-License-Identifier: Apache-2.0
"""Timelines in the trace event format, which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.plan.plan import COMPUTE, Kind

_US_PER_S = 1e6
# More rows than a rank can have.
_ROWS = 1000
_MESSAGES = "communication"
_WEIGHTS = frozenset({Kind.STEP, Kind.CORRECT, Kind.RESTORE})


def chrome_trace(timelines: Timeline | Sequence[Timeline]) -> str:
    """Return JSON with a process for each timeline and a thread for each rank.

    A rank's messages have threads of their own below it, as they may overlap its passes and each
    other. The categories are compute, step (with the putting in place of other weights) and
    communication (with loading).

    Args:
        timelines: One or several; times become microseconds.
    """
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_metadata("process_name", process, 0, {"name": timeline.title}))
        for rank, row in enumerate(timeline.ranks):
            own = [event for event in row if _category(event.action.kind) != _MESSAGES]
            messages = [event for event in row if _category(event.action.kind) == _MESSAGES]
            for index, lane in enumerate([own, *_lanes(messages)]):
                # The first thread of a rank has the rank's number.
                number = rank + index * len(timeline.ranks)
                name = f"rank {rank}, messages {index}" if index else f"rank {rank}"
                events.append(_metadata("thread_name", process, number, {"name": name}))
                place = {"sort_index": rank * _ROWS + index}
                events.append(_metadata("thread_sort_index", process, number, place))
                events += (_box(process, number, event) for event in lane)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Put each event into the first lane that is free when it starts."""
    lanes: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start_s):
        lane = next((lane for lane in lanes if lane[-1].end_s <= event.start_s), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(event)
    return lanes


def _box(process: int, thread: int, event: Event) -> dict[str, Any]:
    action, start_s, end_s = event
    return {
        "ph": "X",
        "name": str(action._replace(version=-1)),
        "cat": _category(action.kind),
        "pid": process,
        "tid": thread,
        "ts": start_s * _US_PER_S,
        "dur": (end_s - start_s) * _US_PER_S,
        "args": {**action._asdict(), "kind": action.kind.name.lower()},
    }


def _category(kind: Kind) -> str:
    if kind in COMPUTE:
        return "compute"
    return "step" if kind in _WEIGHTS else _MESSAGES


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}
