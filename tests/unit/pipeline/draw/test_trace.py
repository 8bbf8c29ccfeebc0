# SPDX-License-Identifier: Apache-2.0
"""The trace for chrome://tracing and Perfetto."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.draw import chrome_trace
from wavemare.pipeline.plan.plan import Action, Kind


def timeline():
    """Return two ranks; the second one posts both of its receives at once."""
    first = (
        Event(Action(Kind.FORWARD, 0, 0, 0), 0.0, 0.010),
        Event(Action(Kind.SEND_ACTIVATION, 0, 0, 0), 0.010, 0.012),
        Event(Action(Kind.FORWARD, 0, 1, 0), 0.010, 0.020),
        Event(Action(Kind.SEND_ACTIVATION, 0, 1, 0), 0.020, 0.022),
        Event(Action(Kind.STEP, 0, 1, 0), 0.0225, 0.025),
    )
    second = (
        Event(Action(Kind.RECV_ACTIVATION, 1, 0, 3), 0.0, 0.012),
        Event(Action(Kind.RECV_ACTIVATION, 1, 1, 3), 0.0, 0.022),
        Event(Action(Kind.FORWARD, 1, 0, 3), 0.012, 0.030),
        Event(Action(Kind.CORRECT, 1, 0, 3), 0.030, 0.031),
        Event(Action(Kind.RECV_NORM, 1, 0, 3), 0.031, 0.032),
    )
    return Timeline("one", (first, second))


def events_of(*timelines):
    text = chrome_trace(timelines[0] if len(timelines) == 1 else timelines)
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def boxes(events):
    return {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}


def test_boxes_say_when_in_microseconds_and_what():
    found = boxes(events_of(timeline()))
    assert len(found) == 10
    for rank in timeline().ranks:
        for action, start_s, end_s in rank:
            box = found[0, str(action._replace(version=-1))]
            assert box["ts"] == pytest.approx(start_s * 1e6)
            assert box["dur"] == pytest.approx((end_s - start_s) * 1e6)
            assert box["args"] == {**action._asdict(), "kind": action.kind.name.lower()}


def test_categories():
    found = boxes(events_of(timeline())).values()
    assert Counter(e["cat"] for e in found) == {"compute": 3, "communication": 5, "step": 2}


def test_a_process_for_each_timeline_and_a_thread_for_each_rank():
    events = events_of(timeline(), Timeline("two", timeline().ranks))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "one", 1: "two"}
    threads = {
        e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1
    }
    assert (threads[0], threads[1]) == ("rank 0", "rank 1")
    found = boxes(events)
    assert found[1, "0F1"]["tid"] == 0
    assert found[1, "1F0"]["tid"] == found[1, "1C0"]["tid"] == 1
    assert threads[found[1, "0SA0"]["tid"]] == "rank 0, messages 1"


def test_no_thread_has_two_boxes_at_a_time():
    threads: dict[int, list[tuple[float, float]]] = {}
    for event in boxes(events_of(timeline())).values():
        threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        assert all(left[1] <= right[0] + 1e-6 for left, right in pairwise(sorted(spans)))
