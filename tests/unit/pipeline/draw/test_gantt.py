# SPDX-License-Identifier: Apache-2.0
"""Gantt charts: spans of lanes, bars at their times, labels and legend, files of both formats."""

import io
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.draw import png, svg
from wavemare.pipeline.draw.gantt import COLOURS, WAITING, figure, lanes, waiting_spans
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind


def event(kind, rank, micro_batch, start_s, end_s):
    return Event(Action(kind, rank, micro_batch, 0), start_s, end_s)


def timeline(title="two ranks"):
    """Return one second: two forwards, two backwards, a step and a wait; idle ends."""
    first = (
        event(Kind.FORWARD, 0, 0, 0.0, 0.2),
        event(Kind.RECV_GRAD, 0, 0, 0.2, 0.6),
        event(Kind.BACKWARD, 0, 0, 0.6, 1.0),
    )
    second = (
        event(Kind.FORWARD, 1, 0, 0.2, 0.4),
        event(Kind.BACKWARD, 1, 0, 0.4, 0.6),
        event(Kind.STEP, 1, 0, 0.6, 0.7),
    )
    return Timeline(title, (first, second))


def bars(axes):
    """Return (kind, row, start, end) of every bar of a panel."""
    return sorted(
        (bar.get_gid(), round(box.y0 + 0.43), round(box.x0), round(box.x1))
        for bar in axes.collections
        if bar.get_gid() is not None
        for box in (path.get_extents() for path in bar.get_paths())
    )


def texts(chart):
    return [text.get_text() for axes in chart.axes for text in axes.texts]


def test_bars_lie_where_their_times_are():
    (axes,) = figure(timeline()).axes
    assert axes.get_xlabel() == "time in ms"
    assert axes.get_xlim() == (0, 1000)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert bars(axes) == [
        ("backward", 0, 600, 1000),
        ("backward", 1, 400, 600),
        ("forward", 0, 0, 200),
        ("forward", 1, 200, 400),
        ("optimizer step", 1, 600, 700),
        ("waiting for messages", 0, 200, 600),
    ]


def test_labels_say_which_micro_batch_and_share():
    chart = figure([timeline(), timeline("again")], title="Everything")
    assert chart.get_suptitle() == "Everything"
    assert [axes.get_title(loc="left") for axes in chart.axes] == ["two ranks", "again"]
    # 0.6 s and 0.5 s of 1 s
    assert chart.axes[0].get_title(loc="right") == "busy 55 % of the time"
    assert texts(chart) == ["0"] * 8
    (legend,) = chart.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["waiting for messages", "forward", "backward", "optimizer step"]


def test_a_timeline_without_events_is_refused():
    with refuses(PlanError, "end_s", 0.0):
        svg(Timeline("", ((), ())))


@pytest.mark.parametrize(("count", "shown"), [(20, 20), (300, 0)])
def test_numbers_appear_when_they_fit(count, shown):
    events = tuple(event(Kind.FORWARD, 0, 1000 + m, m, m + 1) for m in range(count))
    assert len(texts(figure(Timeline("", (events,))))) == shown


def test_svg_is_well_formed_and_the_same_each_time():
    timelines = [timeline("a < b & c"), timeline()]
    text = svg(timelines, title='"x"')
    assert text == svg(timelines, title='"x"')
    root = ElementTree.fromstring(text)
    labels = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a < b & c", "two ranks", '"x"', "rank 0", "forward"} <= labels
    assert COLOURS["forward"] in text


@pytest.mark.parametrize("width", [600, 1200])
def test_png_is_as_wide_as_asked(width):
    image = Image.open(io.BytesIO(png(timeline(), width=width)))
    assert (image.format, image.width) == ("PNG", width)


BUSY = {*COMPUTE, Kind.STEP, Kind.CORRECT, Kind.RESTORE}
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
    assert [(s.start_s, s.end_s, s.label) for s in sums] == [(1.0, 4.0, "3"), (4.0, 5.0, "2")]
    # Where nothing runs beside them the rank waits.
    assert [(s.start_s, s.end_s) for s in own if s.kind == WAITING] == [(2.0, 5.0)]
