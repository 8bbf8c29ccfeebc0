# SPDX-License-Identifier: Apache-2.0
"""Figures of plotly: curves and bars over steps, and timelines that can be zoomed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from wavemare.report.runs import Trace, category

_COLOURS = ("#3b8ed0", "#e69f00", "#2a9d6f", "#d1495b", "#b07cc6", "#56b4e9", "#8c7a4f", "#7a869a")
_MS_PER_S = 1e3


class Series(NamedTuple):
    """One curve.

    Args:
        name: In the legend.
        points: (step, value).
        group: Curves of one group share a colour; its place among those of the figure.
        style: ``solid``, ``dash``, ``dot`` or ``dashdot``, or ``markers`` for points alone.
    """

    name: str
    points: Sequence[tuple[float, float]]
    group: int
    style: str = "solid"


def lines(
    series: Sequence[Series],
    y: str,
    *,
    x: str = "optimizer step",
    zero: bool = False,
) -> Any:
    """Draw curves.

    Args:
        series: The curves; the empty ones are left out.
        y: What the vertical axis shows, with its unit.
        x: The same of the horizontal one.
        zero: Whether the vertical axis begins at 0.

    Returns:
        A figure of plotly.
    """
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for name, points, group, style in series:
        if not points:
            continue
        colour = _COLOURS[group % len(_COLOURS)]
        alone = style == "markers" or len(points) == 1
        figure.add_scatter(
            x=[step for step, _ in points],
            y=[value for _, value in points],
            name=name,
            mode="markers" if alone else "lines",
            marker={"color": colour, "size": 8},
            line={"color": colour, "width": 2, "dash": "solid" if alone else style},
            hovertemplate="%{fullData.name}: %{y:.5g} at %{x}<extra></extra>",
        )
    figure.update_layout(
        xaxis={"title": {"text": x}},
        yaxis={
            "title": {"text": y},
            "rangemode": "tozero" if zero else "normal",
            "exponentformat": "SI" if zero else "power",
        },
    )
    return figure


def bars(names: Sequence[str], points: Mapping[str, Sequence[tuple[int, float]]], y: str) -> Any:
    """Draw parts of a whole over the steps, one above the other."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for number, name in enumerate(names):
        figure.add_bar(
            x=[step for step, _ in points[name]],
            y=[value for _, value in points[name]],
            name=name,
            marker={"color": _COLOURS[number % len(_COLOURS)]},
        )
    figure.update_layout(
        barmode="stack",
        xaxis={"title": {"text": "optimizer step"}},
        yaxis={"title": {"text": y}, "rangemode": "tozero"},
    )
    return figure


class _Look(NamedTuple):
    """Name, colour and height of the bars of a category."""

    name: str
    colour: str
    height: float


_LOOKS = {
    "message": _Look("message, collective or wait", "#9aa5b1", 0.34),
    "other": _Look("other", "#b07cc6", 0.5),
    "forward": _Look("forward", "#3b8ed0", 0.8),
    "backward": _Look("backward", "#e69f00", 0.8),
    "step": _Look("optimizer step", "#2a9d6f", 0.8),
}
"""By category, from the back to the front."""


def gantt(trace: Trace) -> Any:
    """Draw the timelines of ranks over milliseconds, rank 0 at the top.

    Returns:
        A figure of plotly. A span of no length is left out; words and actions stand at the bars.
    """
    from plotly import graph_objects

    several = len({rank.stage for rank in trace.ranks}) > 1
    labels = [
        f"rank {rank.rank}" + (f"<br>stage {rank.stage}" if several else "") for rank in trace.ranks
    ]
    figure = graph_objects.Figure()
    for kind, look in _LOOKS.items():
        bars = [
            (label, span)
            for label, rank in zip(labels, trace.ranks, strict=True)
            for span in rank.spans
            if category(span.text) == kind and span.end_s > span.start_s
        ]
        if bars:
            figure.add_bar(
                orientation="h",
                name=look.name,
                y=[label for label, _ in bars],
                base=[round(span.start_s * _MS_PER_S, 4) for _, span in bars],
                x=[round((span.end_s - span.start_s) * _MS_PER_S, 4) for _, span in bars],
                customdata=[span.text for _, span in bars],
                width=look.height,
                marker={"color": look.colour, "line": {"width": 0}},
                hovertemplate="%{customdata}<br>%{y}<br>from %{base:.3f} ms, %{x:.3f} ms long"
                "<extra></extra>",
            )
    marks = [
        (label, start)
        for label, rank in zip(labels, trace.ranks, strict=True)
        for start, _ in rank.steps
    ]
    figure.add_scatter(
        mode="markers",
        name="step begins",
        x=[round(start * _MS_PER_S, 4) for _, start in marks],
        y=[label for label, _ in marks],
        marker={"symbol": "line-ns-open", "size": 30, "color": "#d1495b", "line_width": 1.5},
        hovertemplate="a step begins at %{x:.3f} ms<extra></extra>",
    )
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        xaxis={"title": {"text": "time (ms)"}},
        yaxis={
            "fixedrange": True,
            "categoryorder": "array",
            "categoryarray": labels[::-1],
        },
    )
    return figure
