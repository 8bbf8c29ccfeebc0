# SPDX-License-Identifier: Apache-2.0
"""Spans of a lane, against a search over small ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.draw.spans import WAITING, busy_spans, collective_spans, lanes, waiting_spans
from wavemare.pipeline.plan.action import Action, Kind

BUSY = {Kind.FORWARD, Kind.BACKWARD, Kind.STEP, Kind.CORRECT, Kind.RESTORE}
EVENTS = st.lists(
    st.builds(
        lambda kind, start, size: Event(Action(kind, 0, 0), start, start + size),
        st.sampled_from(Kind),
        st.integers(0, 12),
        st.integers(0, 8),
    ),
    max_size=8,
)


def covers(event, tick):
    return event.start_s <= tick < event.end_s


@given(EVENTS)
def test_waiting_is_where_only_messages_are_under_way(events):
    waiting = set()
    for tick in range(25):
        kinds = {event.action.kind for event in events if covers(event, tick)}
        if kinds and not kinds & BUSY:
            waiting.add(tick)
    spans = list(waiting_spans(events))
    ticks = [tick for s in spans for tick in range(int(s.start_s), int(s.end_s))]
    assert sorted(ticks) == sorted(waiting)
    assert all(span.kind == WAITING for span in spans)
    # As few as possible: no two of them touch.
    assert len({s.start_s for s in spans} | {s.end_s for s in spans}) == 2 * len(spans)


@pytest.mark.parametrize("kind", list(Kind))
def test_only_work_is_busy_and_only_passes_are_numbered(kind):
    spans = busy_spans([Event(Action(kind, 2, 7, 1), 3.0, 4.0)])
    assert len(spans) == (kind in BUSY)
    assert [s.label for s in spans if s.label] == ["7"] * (kind in {Kind.FORWARD, Kind.BACKWARD})
    assert all((s.start_s, s.end_s) == (3.0, 4.0) for s in spans)


def test_collectives_have_a_lane_below_their_rank():
    events = (
        Event(Action(Kind.FORWARD, 0, 3), 0.0, 1.0),
        Event(Action(Kind.SUM_OUTPUT, 0, 3), 1.0, 4.0),
        Event(Action(Kind.BACKWARD, 1, 2), 1.0, 2.0),
        Event(Action(Kind.SUM_GRADIENT, 1, 2), 4.0, 5.0),
    )
    plain = (Event(Action(Kind.FORWARD, 0, 0), 0.0, 1.0),)
    rows = lanes(Timeline("two", (events, plain)))
    assert [name for name, _ in rows] == ["rank 0", "sums", "rank 1"]
    own, sums, _ = (spans for _, spans in rows)
    assert sums == collective_spans(events)
    assert [(s.start_s, s.end_s, s.label) for s in sums] == [(1.0, 4.0, "3"), (4.0, 5.0, "2")]
    # Where nothing runs beside them the rank waits.
    assert [(s.start_s, s.end_s) for s in own if s.kind == WAITING] == [(2.0, 5.0)]
