# SPDX-License-Identifier: Apache-2.0
"""Timelines in the trace event format, which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.plan.action import COMPUTE, RECEIVES, SENDS, Action, Kind

__all__ = ["chrome_trace"]

_US_PER_S = 1e6
# A viewer ties an arrow to the box that holds its end, and a box does not hold its own last moment.
_INSIDE_US = 0.001

# More rows than a rank can have.
_ROWS = 1000
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
        threads = list(_threads(timeline))
        events.append(_metadata("process_name", process, 0, {"name": timeline.title}))
        for thread in threads:
            events += _boxes(process, thread)
        events += _arrows(process, threads)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


class _Thread(NamedTuple):
    """A row of the viewer; the first one of a rank has the rank's number."""

    number: int
    name: str
    place: int
    events: list[Event]


def _threads(timeline: Timeline) -> Iterator[_Thread]:
    num_ranks = len(timeline.ranks)
    for rank, events in enumerate(timeline.ranks):
        own = [event for event in events if _category(event.action.kind) != "communication"]
        messages = [event for event in events if _category(event.action.kind) == "communication"]
        yield _Thread(rank, f"rank {rank}", rank * _ROWS, own)
        for index, lane in enumerate(_lanes(messages), 1):
            number, place = rank + index * num_ranks, rank * _ROWS + index
            yield _Thread(number, f"rank {rank}, messages {index}", place, lane)


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


def _boxes(process: int, thread: _Thread) -> Iterator[dict[str, Any]]:
    yield _metadata("thread_name", process, thread.number, {"name": thread.name})
    yield _metadata("thread_sort_index", process, thread.number, {"sort_index": thread.place})
    for action, start_s, end_s in thread.events:
        yield {
            "ph": "X",
            "name": str(action._replace(version=-1)),
            "cat": _category(action.kind),
            "pid": process,
            "tid": thread.number,
            "ts": start_s * _US_PER_S,
            "dur": (end_s - start_s) * _US_PER_S,
            "args": {
                "kind": action.kind.name.lower(),
                "stage": action.stage,
                "micro_batch": action.micro_batch,
                "version": action.version,
                "wave": action.wave,
            },
        }


def _arrows(process: int, threads: Sequence[_Thread]) -> Iterator[dict[str, Any]]:
    placed = [(thread.number, event) for thread in threads for event in thread.events]
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
    return "step" if kind in _WEIGHTS else "communication"


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}
