# SPDX-License-Identifier: Apache-2.0
"""Timelines, measured or simulated, as figures that can be zoomed; pages of plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from wavemare.errors import ConfigError
from wavemare.pipeline.clock.timeline import Timeline
from wavemare.pipeline.plan.check import Report
from wavemare.pipeline.plan.plan import Plan
from wavemare.report.page import Page
from wavemare.report.traces import Span, Trace, category

__all__ = ["Row", "gantt", "gantt_height", "plan_page", "rows_of_timeline", "rows_of_trace"]

_MS_PER_S = 1e3
_MOST_BARS = 50_000
_PIXELS_PER_ROW, _PIXELS_AROUND = 44, 190


class _Look(NamedTuple):
    """How a category is drawn: its name, its colour and the height of its bars."""

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


class Row(NamedTuple):
    """A rank's line.

    Args:
        label: Of the line.
        spans: What it did.
        steps: Where optimizer steps begin, in seconds.
    """

    label: str
    spans: Sequence[Span]
    steps: Sequence[float] = ()


def gantt(rows: Sequence[Row]) -> Any:
    """Draw what ranks did, the first one above, over milliseconds.

    Returns:
        A figure of plotly. A span of no length is left out; words and actions stand at the bars.
    """
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for kind, look in _LOOKS.items():
        bars = [
            (row.label, span)
            for row in rows
            for span in row.spans
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
    marks = [(row.label, start) for row in rows for start in row.steps]
    if marks:
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
            "categoryarray": [row.label for row in reversed(rows)],
        },
    )
    return figure


def gantt_height(rows: Sequence[Row]) -> int:
    """Return the pixels that a figure of so many lines needs."""
    return _PIXELS_AROUND + _PIXELS_PER_ROW * len(rows)


def rows_of_trace(trace: Trace) -> list[Row]:
    """Return the lines of what was measured."""
    stages = len({rank.stage for rank in trace.ranks}) > 1
    return [
        Row(
            f"rank {rank.rank}" + (f"<br>stage {rank.stage}" if stages else ""),
            rank.spans,
            [start for start, _ in rank.steps],
        )
        for rank in trace.ranks
    ]


def rows_of_timeline(timeline: Timeline) -> list[Row]:
    """Return the lines of what was simulated."""
    return [
        Row(f"rank {rank}", [Span(str(e.action), e.start_s, e.end_s) for e in events])
        for rank, events in enumerate(timeline.ranks)
    ]


def plan_page(plan: Plan, report: Report, timeline: Timeline, facts: Iterable[str]) -> str:
    """Return a page with a plan: its timeline, what its check found, its text form.

    Args:
        plan: The plan.
        report: Of its check.
        timeline: Of its simulation.
        facts: Sentences about what was predicted.

    Raises:
        ConfigError: The plan has more actions than a browser can draw.
    """
    actions = sum(map(len, plan.ranks))
    if actions > _MOST_BARS:
        remedy = "Give fewer --steps, or --output, whose trace.json Perfetto shows"
        reason = f"the plan has {actions} actions, and a page shows at most {_MOST_BARS}"
        raise ConfigError("--html", plan.schedule, reason, remedy)
    page = Page(
        f"Plan: {plan.schedule}",
        f"{plan.num_stages} stages, {plan.micro_batches} micro-batches per step, "
        f"{plan.num_steps} optimizer steps; simulated, not measured.",
    )
    rows = rows_of_timeline(timeline)
    page.section("Timeline")
    page.text("Draw a frame to zoom into a part of the time; the last button shows all again.")
    page.figure(
        gantt(rows), label="what each rank does, over time", height=gantt_height(rows), zooms=True
    )
    page.section("Prediction")
    for fact in facts:
        page.text(fact)
    page.section("Check")
    page.table(
        ("stage", "peak activations", "max staleness", "mean staleness"),
        zip(
            range(report.num_stages),
            report.peak_activations,
            report.max_staleness,
            report.mean_staleness,
            strict=True,
        ),
    )
    page.details("All that the check found", str(report))
    page.section("Text form")
    page.details("The plan, for --file", str(plan))
    return page.html()
