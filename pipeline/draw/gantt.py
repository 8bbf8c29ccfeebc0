# SPDX-License-Identifier: Apache-2.0
"""Gantt charts of timelines by matplotlib: one row per rank, one colour per kind of action."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import Event, Timeline, bubble
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, WAITING = "optimizer step", "waiting for messages"

# Colours of Okabe and Ito, which people with any colour vision tell apart; blue, green and orange
# differ in lightness as well.
COLOURS = {
    WAITING: "#f1f1f3",
    "forward": "#0072b2",
    "backward": "#f0a830",
    "gradient of inputs": "#d55e00",
    "gradient of weights": "#56b4e9",
    STEP: "#1f2328",
    "weight correction": "#009e73",
    "collective": "#cc79a7",
}
"""Colours by the kind that the legend names, in drawing order."""

_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "gradient of inputs",
    Kind.BACKWARD_WEIGHT: "gradient of weights",
    Kind.STEP: STEP,
    Kind.CORRECT: "weight correction",
    Kind.RESTORE: "weight correction",
}

_DPI = 100
_LANES_PX = 720
_LANE_PX = 12, 38
_PANEL_PX = 44  # title and gap of each timeline
_REST_PX = 96  # figure title, time axis and legend
_POINTS_PER_PX = 72 / _DPI
# A digit is about this wide, relative to the font size.
_DIGIT = 0.64
_FONT_POINTS = 6, 10
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LIGHT = "#f0a830", "#cc79a7", "#56b4e9"


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
    title: str = "",
) -> Figure:
    """Draw timelines below each other on one time axis, with a legend of the colours used.

    Args:
        timelines: One timeline, or several to compare.
        width: Width in pixels; the height follows from the number of ranks.
        title: Text above all timelines.

    Raises:
        PlanError: There is no event, or none ends.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timelines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    ends = [event.end_s for t in timelines for events in t.ranks for event in events]
    end_s = max(ends, default=0.0)
    if not 0 < end_s < math.inf:
        reason = f"nothing happens between 0 s and {end_s:g} s"
        raise PlanError("end_s", end_s, reason, "Give a timeline with events")
    rows = [lanes(timeline) for timeline in timelines]
    num_lanes = [max(len(lane), 1) for lane in rows]
    lane_px = min(max(_LANES_PX / sum(num_lanes), _LANE_PX[0]), _LANE_PX[1])
    height = lane_px * sum(num_lanes) + _PANEL_PX * len(rows) + _REST_PX
    size = width / _DPI, height / _DPI
    chart = Figure(size, dpi=_DPI, layout="constrained")
    panels = chart.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=num_lanes)
    seconds, unit = next((u for u in _UNITS if end_s >= 10 * u[0]), _UNITS[-1])
    for axes, timeline, lane in zip(panels[:, 0], timelines, rows, strict=True):
        axes.set_xlim(0, end_s / seconds)
        _style(axes, [name for name, _ in lane], last=axes is panels[-1, 0])
        axes.set_title(timeline.title, loc="left", fontsize=12)
        busy = 100 * (1 - bubble(timeline))
        axes.set_title(f"busy {busy:.0f} % of the time", loc="right", fontsize=9, color="#59636e")
        px_per_s = (width - 110) / end_s
        for row, (_, spans) in enumerate(lane):
            _draw_lane(axes, row, spans, seconds, px_per_s, lane_px)
    panels[-1, 0].set_xlabel(f"time in {unit}")
    used = {span.kind for lane in rows for _, spans in lane for span in spans}
    keys = [
        Patch(facecolor=colour, label=kind, **_hatch(kind))
        for kind, colour in COLOURS.items()
        if kind in used
    ]
    chart.legend(handles=keys, loc="outside lower left", ncols=len(keys), frameon=False)
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
        bars = [(s.start_s / unit, (s.end_s - s.start_s) / unit) for s in own]
        typical_px = median([s.end_s - s.start_s for s in own]) * px_per_s if own else 0.0
        line = {"edgecolor": "white", "linewidth": 0.7 if typical_px > 3 else 0.0}  # noqa: PLR2004
        if kind == STEP:  # a short one stays visible
            line = {"edgecolor": colour, "linewidth": 1.0}
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


def _hatch(kind: str) -> dict[str, Any]:
    hatch = {"hatch": "//////", "edgecolor": "#c4c6cc", "linewidth": 0.0}
    return hatch if kind == WAITING else {}


class Span(NamedTuple):
    """A stretch of time of one colour.

    Args:
        start_s: Start, in seconds since the timeline's beginning.
        end_s: End, likewise.
        kind: A key of `COLOURS`.
        label: Text to write inside if there is room.
    """

    start_s: float
    end_s: float
    kind: str
    label: str = ""


def busy_spans(events: Iterable[Event]) -> list[Span]:
    """Return passes, optimizer steps and weight corrections, in the order of their starts."""
    spans = []
    for action, start_s, end_s in events:
        if action.kind in _KINDS:
            label = str(action.micro_batch) if action.kind in COMPUTE else ""
            spans.append(Span(start_s, end_s, _KINDS[action.kind], label))
    return sorted(spans)


def lanes(timeline: Timeline) -> list[tuple[str, list[Span]]]:
    """Return the names and spans of a timeline's lanes, from top to bottom.

    Each rank has one, and below it one for its collectives if it has any.
    """
    rows = []
    for rank, events in enumerate(timeline.ranks):
        rows.append((f"rank {rank}", [*waiting_spans(events), *busy_spans(events)]))
        collectives = [e for e in events if e.action.kind in COLLECTIVES]
        if collectives:
            sums = [Span(s, end, "collective", str(a.micro_batch)) for a, s, end in collectives]
            rows.append(("sums", sorted(sums)))
    return rows


def waiting_spans(events: Iterable[Event]) -> Iterator[Span]:
    """Return when a rank waited for messages or data and computed nothing.

    A receive may be posted long before its data is needed; time in which the rank computes does
    not count as waiting.
    """
    edges = []
    for action, start_s, end_s in events:
        busy = action.kind in _KINDS
        edges += [(start_s, busy, 1), (end_s, busy, -1)]
    pending = {True: 0, False: 0}
    since: float | None = None
    for time, changes in groupby(sorted(edges), key=itemgetter(0)):
        for _, busy, change in changes:
            pending[busy] += change
        waits = pending[False] > 0 and not pending[True]
        if waits and since is None:
            since = time
        elif not waits and since is not None:
            yield Span(since, time, WAITING)
            since = None


def _save(chart: Figure, format: str) -> bytes:
    import matplotlib as mpl

    file = io.BytesIO()
    # Text stays text, and the same timeline gives the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "wavemare"}):
        chart.savefig(file, format=format, metadata={"Date": None} if format == "svg" else None)
    return file.getvalue()
