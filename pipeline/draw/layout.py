# SPDX-License-Identifier: Apache-2.0
"""Timelines as Gantt charts below each other on one time axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from wavemare.errors import PlanError
from wavemare.pipeline.clock.timeline import Timeline
from wavemare.pipeline.draw.lane import PAINTS, STEP, Span, busy_spans, lanes
from wavemare.pipeline.draw.picture import Box, Label, Line, Paint, Picture

__all__ = ["gantt"]

_MARGIN = 24.0
_LEFT = 82.0
_TITLE_HEIGHT = 40.0
_PANEL_TITLE_HEIGHT = 32.0
_PANEL_GAP = 18.0
_AXIS_HEIGHT = 34.0
_LEGEND_HEIGHT = 26.0
# Lanes share this height as long as each stays readable.
_LANES_HEIGHT = 720.0
_LANE_HEIGHTS = 12.0, 38.0
_LANE_GAP = 0.14

_TITLE_SIZE = 21.0
_PANEL_SIZE = 17.0
_TEXT_SIZE = 14.0
_DARK, _GREY, _PALE, _LANE_COLOUR = "#1f2328", "#59636e", "#d8dce1", "#e6e8eb"
# Mean width of a character of the usual sans-serif fonts, by their size.
_CHARACTER = 0.56

# An optimizer step that takes no time is drawn so wide, where it is not crowded.
_MARK = 2.0
_MARK_DISTANCE = 8.0
# Edges lie on multiples of this. Of smaller boxes only those are drawn that cover such a place, so
# that the colours keep their shares.
_FINEST = 0.5
# Between two passes, unless they are small.
_SLIT = 1.0
_SLIT_ABOVE = 3.0
# Numbers inside boxes: least size, and free pixels beside them.
_SMALLEST = 9.0
_PADDING = 2.0
_MAX_TICKS = 14
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def gantt(
    timelines: Timeline | Sequence[Timeline],
    *,
    width: int = 1200,
    start_s: float = 0.0,
    end_s: float | None = None,
    title: str = "",
) -> Picture:
    """Lay out a lane per rank, with its collectives below, and a legend of the colours that occur.

    Args:
        timelines: One, or several to compare.
        width: Of the picture, in pixels; its height follows from the number of ranks.
        start_s: Left end of the time axis.
        end_s: Its right end; by default the end of the last event.
        title: Above everything.

    Raises:
        PlanError: There is nothing to draw between the two ends.
    """
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    ends = [event.end_s for t in timelines for events in t.ranks for event in events]
    end_s = max(ends, default=0.0) if end_s is None else end_s
    if not start_s < end_s < math.inf:
        reason = f"nothing happens between {start_s:g} s and {end_s:g} s"
        raise PlanError("end_s", end_s, reason, "Give a later end, or a timeline with events")
    num_lanes = sum(len(lanes(timeline)) for timeline in timelines)
    lowest, highest = _LANE_HEIGHTS
    lane = min(max(_LANES_HEIGHT / max(num_lanes, 1), lowest), highest)
    scale = _Scale(_LEFT, width - _MARGIN, start_s, end_s)
    chart = _Chart(Picture(width, 0), scale, lane)
    if title:
        chart.add_title(title)
    for timeline in timelines:
        chart.add_panel(timeline)
    chart.finish()
    return chart.picture


class _Scale(NamedTuple):
    """Seconds to pixels."""

    left: float
    right: float
    start_s: float
    end_s: float

    def x(self, time_s: float) -> float:
        """Return where a time lies, at the ends if it is outside."""
        share = (time_s - self.start_s) / (self.end_s - self.start_s)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def ticks(self) -> tuple[list[tuple[float, str]], str]:
        """Return places and texts of round times, and their unit."""
        rough = (self.end_s - self.start_s) / _MAX_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= rough * (1 - 1e-9))
        # The coarsest unit in which ticks are whole numbers.
        size, unit = next((u for u in _UNITS if step >= u[0] * (1 - 1e-9)), _UNITS[-1])
        first = math.ceil(self.start_s / step - 1e-9)
        last = math.floor(self.end_s / step + 1e-9)
        times = [number * step for number in range(first, last + 1)]
        return [(self.x(time), f"{time / size:.10g}") for time in times], unit


class _Chart:
    """Fills a picture from top to bottom."""

    def __init__(self, picture: Picture, scale: _Scale, lane: float) -> None:
        self.picture = picture
        self._scale = scale
        self._lane = lane
        self._y = _MARGIN / 2
        self._panels: list[tuple[float, float]] = []

    def add_title(self, title: str) -> None:
        """Write a line above everything."""
        middle = self._y + _TITLE_HEIGHT / 2
        self._write(_MARGIN, middle, title, _TITLE_SIZE, _DARK)
        self._y += _TITLE_HEIGHT

    def add_panel(self, timeline: Timeline) -> None:
        """Add a timeline below what is there."""
        if self._panels:
            self._y += _PANEL_GAP
        middle = self._y + _PANEL_TITLE_HEIGHT / 2
        self._write(_MARGIN, middle, timeline.title, _PANEL_SIZE, _DARK)
        note = f"busy {100 * _utilisation(timeline, self._scale):.0f} % of the time"
        label = Label(self._scale.right, middle, note, _TEXT_SIZE, _GREY, "end")
        self.picture.labels.append(label)
        self._y += _PANEL_TITLE_HEIGHT
        top = self._y
        for name, spans in lanes(timeline):
            middle = self._y + self._lane / 2
            size = min(_TEXT_SIZE, self._lane)
            label = Label(_LEFT - 12, middle, name, size, _GREY, "end")
            self.picture.labels.append(label)
            line = Line(self._scale.left, middle, self._scale.right, middle, _LANE_COLOUR)
            self.picture.lines.append(line)
            self._add_lane(spans)
            self._y += self._lane
        self._panels.append((top, self._y))

    def finish(self) -> None:
        """Add the axis and the legend, and set the picture's height."""
        ticks, unit = self._scale.ticks()
        middle = self._y + _AXIS_HEIGHT / 2
        for x, text in ticks:
            for top, bottom in self._panels:
                self.picture.lines.append(Line(x, top, x, bottom + 5, _PALE))
            self.picture.labels.append(Label(x, middle, text, _TEXT_SIZE, _GREY, "middle"))
        self._y += _AXIS_HEIGHT
        middle = self._y + _LEGEND_HEIGHT / 2
        label = Label(self._scale.right, middle, f"time in {unit}", _TEXT_SIZE, _GREY, "end")
        self.picture.labels.append(label)
        self._add_legend(middle)
        self.picture.height = round(self._y + _LEGEND_HEIGHT + _MARGIN / 2)

    def _add_legend(self, middle: float) -> None:
        used = {box.paint for box in self.picture.boxes}
        x = self._scale.left
        for paint in PAINTS:
            if paint in used:
                self.picture.boxes.append(Box(x, middle - 8, 24, 16, paint))
                self._write(x + 32, middle, paint.name, _TEXT_SIZE, _GREY)
                x += 32 + _CHARACTER * _TEXT_SIZE * len(paint.name) + 28

    def _add_lane(self, spans: Sequence[Span]) -> None:
        left_s, right_s = self._scale.start_s, self._scale.end_s
        shown = [span for span in spans if span.start_s <= right_s and span.end_s >= left_s]
        gap = self._lane * _LANE_GAP
        top, height = self._y + gap / 2, self._lane - gap
        sizes = {paint: self._label_size(paint, shown, height) for paint in PAINTS}
        last_mark = -math.inf
        marks = []
        for span in shown:
            left, right = (_snap(self._scale.x(time)) for time in (span.start_s, span.end_s))
            if span.paint is STEP and right - left < _MARK and left - last_mark > _MARK_DISTANCE:
                last_mark = left
                box = Box(left - _MARK / 2, top, _MARK, height, span.paint, span.hint)
                marks.append(box)
            elif left < right:
                slit = _SLIT if span.label and right - left > _SLIT_ABOVE else 0.0
                box = Box(left, top, right - left - slit, height, span.paint, span.hint)
                self.picture.boxes.append(box)
                self._add_label(box, span.label, sizes[span.paint])
        # Last, as the next box begins where they are.
        self.picture.boxes += marks

    def _label_size(self, paint: Paint, spans: Sequence[Span], height: float) -> float:
        """Return how large the numbers of a lane's boxes of one kind may be; 0 for none at all.

        All have one size: that at which the longest number fits into a box of usual width.
        """
        labelled = [span for span in spans if span.paint is paint and span.label]
        if not labelled:
            return 0.0
        usual = median(self._scale.x(s.end_s) - self._scale.x(s.start_s) for s in labelled)
        longest = max(len(span.label) for span in labelled)
        fitting = (usual - _SLIT - _PADDING) / (_CHARACTER * longest)
        size = min(_TEXT_SIZE, height * 0.72, math.floor(fitting * 2) / 2)
        return size if size >= _SMALLEST else 0.0

    def _add_label(self, box: Box, text: str, size: float) -> None:
        # A box may be narrower than usual: at the edge of the window, for one.
        if text and size and _CHARACTER * size * len(text) <= box.width:
            x, y = box.left + box.width / 2, box.top + box.height / 2
            self.picture.labels.append(Label(x, y, text, size, box.paint.text, "middle"))

    def _write(self, x: float, y: float, text: str, size: float, colour: str) -> None:
        self.picture.labels.append(Label(x, y, text, size, colour))


def _snap(x: float) -> float:
    return round(x / _FINEST) * _FINEST


def _utilisation(timeline: Timeline, scale: _Scale) -> float:
    """Return which share of the ranks' time in the window they compute or step.

    A timeline that begins later or ends earlier than the window counts from its own beginning and
    to its own end.
    """
    events = [event for events in timeline.ranks for event in events]
    start_s = max(min((e.start_s for e in events), default=0.0), scale.start_s)
    end_s = min(max((e.end_s for e in events), default=0.0), scale.end_s)
    if start_s >= end_s:
        return 0.0
    busy = sum(
        max(min(span.end_s, end_s) - max(span.start_s, start_s), 0.0)
        for events in timeline.ranks
        for span in busy_spans(events)
    )
    return busy / (end_s - start_s) / len(timeline.ranks)
