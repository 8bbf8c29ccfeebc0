# SPDX-License-Identifier: Apache-2.0
"""Gantt charts of timelines by matplotlib: one row per rank, one colour per kind of action."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from wavemare.errors import PlanError
from wavemare.pipeline.clock.timeline import Timeline
from wavemare.pipeline.draw.spans import COLOURS, STEP, WAITING, Span, busy_spans, lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "png", "svg"]

_DPI = 100
_LANES_PX = 720
_LANE_PX = 12, 38
_PANEL_PX = 44  # title and gap of each timeline
_REST_PX = 96  # figure title, time axis and legend
_POINTS_PER_PX = 72 / _DPI
# A digit is about this wide, relative to the font size.
_DIGIT = 0.64
_FONT_POINTS = 6, 10
_MARK_PX, _MARK_DISTANCE_PX = 2, 8
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LIGHT = "#f0a830", "#cc79a7"


def png(timelines: Timeline | Sequence[Timeline], **options: Any) -> bytes:
    """Return a PNG picture; see `figure` for the arguments."""
    return _save(figure(timelines, **options), "png")


def svg(timelines: Timeline | Sequence[Timeline], **options: Any) -> str:
    """Return an SVG picture with selectable text; see `figure` for the arguments."""
    return _save(figure(timelines, **options), "svg").decode()


def figure(
    timelines: Timeline | Sequence[Timeline],
    *,
    width: int = 1200,
    start_s: float = 0.0,
    end_s: float | None = None,
    title: str = "",
) -> Figure:
    """Draw timelines below each other on one time axis, with a legend of the colours used.

    Args:
        timelines: One timeline, or several to compare.
        width: Width in pixels; the height follows from the number of ranks.
        start_s: Left end of the time axis, in seconds.
        end_s: Right end; the end of the last event if omitted.
        title: Text above all timelines.

    Raises:
        PlanError: No event lies between the two ends.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timelines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    ends = [event.end_s for t in timelines for events in t.ranks for event in events]
    end_s = max(ends, default=0.0) if end_s is None else end_s
    if not start_s < end_s < math.inf:
        reason = f"nothing happens between {start_s:g} s and {end_s:g} s"
        raise PlanError("end_s", end_s, reason, "Give a later end, or a timeline with events")
    rows = [lanes(timeline) for timeline in timelines]
    num_lanes = [max(len(lane), 1) for lane in rows]
    lane_px = min(max(_LANES_PX / sum(num_lanes), _LANE_PX[0]), _LANE_PX[1])
    height = lane_px * sum(num_lanes) + _PANEL_PX * len(rows) + _REST_PX
    size = width / _DPI, height / _DPI
    chart = Figure(size, dpi=_DPI, layout="constrained")
    panels = chart.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=num_lanes)
    seconds, unit = next((u for u in _UNITS if end_s - start_s >= 10 * u[0]), _UNITS[-1])
    for axes, timeline, lane in zip(panels[:, 0], timelines, rows, strict=True):
        axes.set_xlim(start_s / seconds, end_s / seconds)
        _style(axes, [name for name, _ in lane], last=axes is panels[-1, 0])
        axes.set_title(timeline.title, loc="left", fontsize=12)
        busy = 100 * _utilisation(timeline, start_s, end_s)
        axes.set_title(f"busy {busy:.0f} % of the time", loc="right", fontsize=9, color="#59636e")
        px_per_s = (width - 110) / (end_s - start_s)
        for row, (_, spans) in enumerate(lane):
            shown = [s for s in spans if s.start_s <= end_s and s.end_s >= start_s]
            _draw_lane(axes, row, shown, seconds, px_per_s, lane_px)
    panels[-1, 0].set_xlabel(f"time in {unit}")
    used = {span.kind for lane in rows for _, spans in lane for span in spans}
    keys = [
        Patch(facecolor=colour, label=kind, **_hatch(kind))
        for kind, colour in COLOURS.items()
        if kind in used
    ]
    chart.legend(handles=keys, loc="outside lower left", ncols=len(COLOURS), frameon=False)
    if title:
        chart.suptitle(title, fontsize=14)
    return chart


def _style(axes: Axes, names: Sequence[str], *, last: bool) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0, labelsize=9, labelcolor="#59636e")
    axes.tick_params(axis="x", labelbottom=last)
    axes.grid(axis="x", color="#d8dce1")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _draw_lane(
    axes: Axes, row: int, spans: Sequence[Span], unit: float, px_per_s: float, lane_px: float
) -> None:
    for kind, colour in COLOURS.items():
        own = [span for span in spans if span.kind == kind]
        if kind == STEP:
            _mark_short_steps(axes, row, own, unit, px_per_s)
        bars = [(s.start_s / unit, (s.end_s - s.start_s) / unit) for s in own]
        typical_px = median([s.end_s - s.start_s for s in own]) * px_per_s if own else 0.0
        line = {"edgecolor": "white", "linewidth": 0.7 if typical_px > 3 else 0.0}  # noqa: PLR2004
        axes.broken_barh(
            bars, (row - 0.43, 0.86), facecolor=colour, gid=kind, **{**line, **_hatch(kind)}
        )
        labelled = [span for span in own if span.label]
        longest = max((len(span.label) for span in labelled), default=1)
        points = min(typical_px / (_DIGIT * longest), 0.72 * lane_px) * _POINTS_PER_PX
        if points < _FONT_POINTS[0]:
            continue
        for span in labelled:
            axes.text(
                (span.start_s + span.end_s) / 2 / unit,
                row,
                span.label,
                size=min(points, _FONT_POINTS[1]),
                color="#1f2328" if colour in _LIGHT else "white",
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def _mark_short_steps(
    axes: Axes, row: int, steps: Sequence[Span], unit: float, px_per_s: float
) -> None:
    """Draw a line for each optimizer step that is too short to see, unless they are crowded."""
    last = -math.inf
    for step in steps:
        short = (step.end_s - step.start_s) * px_per_s < _MARK_PX
        if short and (step.start_s - last) * px_per_s > _MARK_DISTANCE_PX:
            last = step.start_s
            width = _MARK_PX * _POINTS_PER_PX
            axes.vlines(last / unit, row - 0.43, row + 0.43, COLOURS[STEP], linewidth=width)


def _hatch(kind: str) -> dict[str, Any]:
    if kind != WAITING:
        return {}
    return {"hatch": "//////", "edgecolor": "#c4c6cc", "linewidth": 0.0}


def _utilisation(timeline: Timeline, start_s: float, end_s: float) -> float:
    """Return the share of the ranks' time that is busy, between the first and the last event."""
    events = [event for events in timeline.ranks for event in events]
    start_s = max(min((e.start_s for e in events), default=0.0), start_s)
    end_s = min(max((e.end_s for e in events), default=0.0), end_s)
    if start_s >= end_s:
        return 0.0
    busy = sum(
        max(min(span.end_s, end_s) - max(span.start_s, start_s), 0.0)
        for events in timeline.ranks
        for span in busy_spans(events)
    )
    return busy / (end_s - start_s) / len(timeline.ranks)


def _save(chart: Figure, format: str) -> bytes:
    import matplotlib as mpl

    file = io.BytesIO()
    # Text stays text, and the same timeline gives the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "wavemare"}):
        chart.savefig(file, format=format, metadata={"Date": None} if format == "svg" else None)
    return file.getvalue()
