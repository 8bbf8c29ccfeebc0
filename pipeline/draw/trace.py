# SPDX-License-Identifier: Apache-2.0
"""Timelines in the trace event format, which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.plan.plan import COMPUTE, RECEIVES, SENDS, Action, Kind

_US_PER_S = 1e6
# A viewer ties an arrow to the box that holds its end, and a box does not hold its own last moment.
_INSIDE_US = 0.001

# More rows than a rank can have.
_ROWS = 1000
_MESSAGES = "communication"
_WEIGHTS = frozenset({Kind.STEP, Kind.CORRECT, Kind.RESTORE})


def chrome_trace(timelines: Timeline | Sequence[Timeline]) -> str:
    """Return JSON with a process for each timeline and a thread for each rank.

    A rank's messages have threads of their own below it, as they may overlap its passes and each
    other; arrows lead from sends to receives. The categories are compute, step (with the putting
    in place of other weights) and communication (with loading).

    Args:
        timelines: One or several; times become microseconds.
    """
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_metadata("process_name", process, 0, {"name": timeline.title}))
        placed: list[tuple[int, Event]] = []
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
                placed += ((number, event) for event in lane)
        events += _arrows(process, placed)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Put each event into the first lane that is free when it starts."""
    lanes: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start_s):
        free = (lane for lane in lanes if lane[-1].end_s <= event.start_s)
        lane = next(free, None)
        if lane is None:
            lanes.append([event])
        else:
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


def _arrows(process: int, placed: Sequence[tuple[int, Event]]) -> Iterator[dict[str, Any]]:
    sends = {_message(e.action): (tid, e) for tid, e in placed if e.action.kind in SENDS}
    receives = [(tid, event) for tid, event in placed if event.action.kind in RECEIVES]
    for number, (receiver, receive) in enumerate(receives):
        kind, distance = RECEIVES[receive.action.kind]
        action = receive.action._replace(kind=kind, stage=receive.action.stage + distance)
        if _message(action) not in sends:
            continue
        sender, send = sends[_message(action)]
        arrow = {"name": "message", "cat": "message", "id": f"{process}.{number}", "pid": process}
        end = max(receive.start_s * _US_PER_S, receive.end_s * _US_PER_S - _INSIDE_US)
        yield {**arrow, "ph": "s", "tid": sender, "ts": send.start_s * _US_PER_S}
        yield {**arrow, "ph": "f", "bp": "e", "tid": receiver, "ts": end}


def _message(send: Action) -> Action:
    # The two ends of a message meet different versions of weights.
    return send._replace(version=-1)


def _category(kind: Kind) -> str:
    if kind in COMPUTE:
        return "compute"
    return "step" if kind in _WEIGHTS else _MESSAGES


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}
