# SPDX-License-Identifier: Apache-2.0
"""Gantt charts: the parts of the picture, and that SVG and PNG show them."""

import io
import re
from collections import Counter
from xml.etree import ElementTree

import pytest
from PIL import Image

from wavemare.errors import PlanError
from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.draw import png, svg
from wavemare.pipeline.draw.lane import PAINTS
from wavemare.pipeline.draw.layout import gantt
from wavemare.pipeline.plan.action import Action, Kind

FORWARD, BACKWARD = PAINTS[:2]
SVG = "{http://www.w3.org/2000/svg}"


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


def boxes(picture, name):
    """Return the boxes of a kind without the legend's, which is the last one."""
    return [box for box in picture.boxes if box.paint.name == name][:-1]


def texts(picture):
    return [label.text for label in picture.labels]


def test_boxes_lie_where_their_times_are():
    picture = gantt(timeline())
    first, second = boxes(picture, "forward")
    (waiting,) = boxes(picture, "waiting for messages")
    last, _ = boxes(picture, "backward")
    (step,) = boxes(picture, "optimizer step")
    second_px = (last.right - first.left + 1) / 1.0  # one pixel is left free between passes
    for box, start_s, end_s in [
        (first, 0.0, 0.2),
        (second, 0.2, 0.4),
        (waiting, 0.2, 0.6),
        (last, 0.6, 1.0),
        (step, 0.6, 0.7),
    ]:
        assert box.left == pytest.approx(first.left + start_s * second_px, abs=0.5)
        assert box.right == pytest.approx(first.left + end_s * second_px, abs=1.5)
    assert first.top == waiting.top == last.top
    assert second.top == step.top >= first.top + first.height
    places = {label.text: label.y for label in picture.labels}
    assert places["two ranks"] < 40  # nothing but a margin is above
    for name, box in (("rank 0", first), ("rank 1", second)):
        assert places[name] == pytest.approx(box.top + box.height / 2)


def test_labels_say_which_rank_micro_batch_and_share():
    found = Counter(texts(gantt(timeline(), title="Everything")))
    assert {"Everything", "two ranks", "rank 0", "rank 1", "time in ms"} <= found.keys()
    # Micro-batch 0 in four boxes, and the axis' own 0.
    assert found["0"] == 5
    assert "busy 55 % of the time" in found  # 0.6 s and 0.5 s of 1 s
    legend = ["forward", "backward", "optimizer step", "waiting for messages"]
    assert [text for text in texts(gantt(timeline())) if text in legend] == legend


@pytest.mark.parametrize("window", [(0.0, 0.0), (2.0, None), (0.5, 0.1), (0.0, float("inf"))])
def test_an_empty_window_is_refused(window):
    with pytest.raises(PlanError, match="nothing happens between"):
        gantt(timeline(), start_s=window[0], end_s=window[1])
    with pytest.raises(PlanError, match="nothing happens between"):
        svg(Timeline("", ((), ())))


def test_numbers_appear_when_they_fit():
    def numbers(count):
        events = tuple(event(Kind.FORWARD, 0, 1000 + m, m, m + 1) for m in range(count))
        found = texts(gantt(Timeline("", (events,))))
        return sum(bool(re.fullmatch(r"1\d\d\d", text)) for text in found)

    assert numbers(20) == 20
    assert numbers(46) == 46  # at the least size
    assert numbers(60) == 0  # they would have to be tiny
    assert numbers(300) == 0


def test_svg_is_well_formed_and_has_each_box():
    root = ElementTree.fromstring(svg([timeline("a < b & c"), timeline()], title='"x"'))
    assert (root.tag, root.get("width")) == (f"{SVG}svg", "1200")
    count = Counter(rect.get("class") for rect in root.iter(f"{SVG}rect"))
    # Two timelines, and one box in the legend.
    assert count["forward"] == count["backward"] == 5
    assert count["optimizer-step"] == count["waiting-for-messages"] == 3
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b & c", "two ranks", '"x"'} <= set(labels)
    hints = Counter(title.text for title in root.iter(f"{SVG}title"))
    assert hints == dict.fromkeys(["0F0@0", "0B0@0", "1F0@0", "1B0@0", "1S0@0"], 2)
    style = root.find(f"{SVG}style")
    assert style is not None
    assert f".forward {{ fill: {FORWARD.fill}; }}" in (style.text or "")
    assert "fill: url(#waiting-for-messages)" in (style.text or "")


@pytest.mark.parametrize("width", [600, 1200])
def test_png_has_the_colours_where_the_boxes_are(width):
    picture = gantt(timeline(), width=width)
    image = Image.open(io.BytesIO(png(timeline(), width=width)))
    assert (image.format, image.size) == ("PNG", (width, picture.height))
    for box in picture.boxes:
        # Beside the number in the middle, and off the edges.
        left, right = box.left + box.width * 0.1 + 1, box.right - box.width * 0.1 - 2
        for x in (left, right):
            pixel = image.getpixel((round(x), round(box.top + box.height / 2)))
            colour = "#{:02x}{:02x}{:02x}".format(*pixel)  # type: ignore[misc]
            if box.paint.hatch is None:
                assert colour == box.paint.fill
    first, second = boxes(picture, "forward")
    idle = (round(first.left) + 4, round(second.top) + 4)
    assert image.getpixel(idle) == (255, 255, 255)
