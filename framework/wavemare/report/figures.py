# SPDX-License-Identifier: Apache-2.0
"""Curves and bars over the steps of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Series", "bars", "lines"]

_COLOURS = ("#3b8ed0", "#e69f00", "#2a9d6f", "#d1495b", "#b07cc6", "#56b4e9", "#8c7a4f", "#7a869a")


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
    levels: Mapping[str, float] | None = None,
) -> Any:
    """Draw curves.

    Args:
        series: The curves; the empty ones are left out.
        y: What the vertical axis shows, with its unit.
        x: The same of the horizontal one.
        zero: Whether the vertical axis begins at 0.
        levels: Values to compare with, by name, as horizontal lines.

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
    if levels:
        _add_levels(figure, series, levels)
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
    """Draw parts of a whole over the steps, one above the other.

    Args:
        names: Of the parts, from below.
        points: (step, value) by name.
        y: What the vertical axis shows, with its unit.
    """
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


def _add_levels(figure: Any, series: Sequence[Series], levels: Mapping[str, float]) -> None:
    steps = [step for each in series for step, _ in each.points]
    ends = [min(steps, default=0), max(steps, default=1)]
    for number, (name, value) in enumerate(levels.items()):
        figure.add_scatter(
            x=ends,
            y=[value, value],
            name=f"{name} ({value:.3g})",
            mode="lines",
            line={"color": "#7a869a", "width": 1.5, "dash": ("dash", "dot", "dashdot")[number % 3]},
            hovertemplate="%{fullData.name}<extra></extra>",
        )
