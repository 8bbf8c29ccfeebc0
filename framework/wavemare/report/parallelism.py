# SPDX-License-Identifier: Apache-2.0
"""How ranks worked together in runs: pipeline, collective, timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wavemare.observe.lines import numbered
from wavemare.pipeline.staleness.staleness import max_staleness
from wavemare.report.figures import Series, bars, gantt, lines
from wavemare.report.page import Page
from wavemare.report.runs import RunFacts
from wavemare.report.traces import Trace

_MIB = 2**20
_CALLS = "sparse_calls_"
_DASHES = ("solid", "dash", "dot")
_PIXELS_PER_RANK, _PIXELS_AROUND = 44, 190


def add_pipeline(page: Page, runs: Sequence[RunFacts]) -> None:
    """Add bubble, measured and predicted, and staleness by stage."""
    page.section("Pipeline")
    for run in runs:
        if run.layout["stages"] == 1:
            page.missing(run.name, "neither bubble nor staleness: the run has no pipeline")
        else:
            _add_bubble(page, run)
            _add_staleness(page, run)


def _add_bubble(page: Page, run: RunFacts) -> None:
    page.heading(
        f"Bubble: {run.name}",
        "Share of the stages' time in which they did not compute: measured in every step; and the "
        "part of it that the unevenness of the stages explains; metrics.jsonl.",
    )
    names = {"measured": "bubble", "by unevenness": "bubble_predicted"}
    series = _series(run, names, 100)
    if series[0].points:
        page.figure(lines(series, "bubble (% of time)", zero=True), label="bubble over the steps")
    else:
        page.missing("bubble in every step", "only the schedule pipemare measures it")
    if run.trace is None:
        page.missing("bubble of recorded steps", "no steps were recorded (--trace_steps)")
    else:
        page.table(("recorded steps", "bubble"), [("measured", f"{run.trace.bubble:.1%}")])


def _add_staleness(page: Page, run: RunFacts) -> None:
    stages = sorted({stage for line in run.metrics for stage in numbered(line, "staleness")})
    if not stages:
        page.missing(f"staleness of {run.name}", "only the schedule pipemare has and measures it")
        return
    page.heading(
        f"Staleness: {run.name}",
        "Optimizer steps between a micro-batch's forward and backward pass, mean of the step, by "
        f"stage; metrics.jsonl. {_planned(run)}",
    )
    series = [Series(f"stage {s}", run.series(f"staleness_{s}"), s) for s in stages]
    page.figure(lines(series, "staleness (steps)", zero=True), label="staleness by stage")


def add_collective(page: Page, runs: Sequence[RunFacts]) -> None:
    """Add density, bytes, choices and times of the sparse collective."""
    page.section("Sparse collective")
    for run in runs:
        if not run.series("sparse_payload_bytes"):
            page.missing(run.name, "no collective is recorded: the run did not use the sparse one")
            continue
        page.heading(
            f"Density: {run.name}",
            "Share of the gradients' blocks that are not zero, on rank 0's view: mean over ranks, "
            "and of the union of all ranks; metrics.jsonl.",
        )
        names = {"mean of the ranks": "sparse_density", "union": "sparse_union"}
        density = _series(run, names, 100)
        if any(each.points for each in density):
            page.figure(lines(density, "blocks that are not zero (%)", zero=True), label="density")
        else:
            page.missing("density", "no call has looked at the blocks: all were dense")
        page.heading(f"Bytes per step: {run.name}", "What rank 0 sent and received; metrics.jsonl.")
        names = {
            "sent": "sparse_bytes_up",
            "received": "sparse_bytes_down",
            "gradients": "sparse_payload_bytes",
        }
        moved = _series(run, names, 1 / _MIB)
        page.figure(lines(moved, "MiB per step", zero=True), label="bytes per step")
        page.heading(
            f"The selector's choices: {run.name}", "Calls per step by executor; metrics.jsonl."
        )
        keys = sorted({key for line in run.metrics for key in line if key.startswith(_CALLS)})
        calls = {key.removeprefix(_CALLS): run.series(key) for key in keys}
        page.figure(bars(list(calls), calls, "calls per step"), label="choices of the selector")
        page.heading(f"Time in the collective: {run.name}", "Per step, on rank 0; metrics.jsonl.")
        names = {"measured": "sparse_seconds", "predicted": "sparse_predicted_seconds"}
        seconds = lines(_series(run, names, 1000), "ms per step", zero=True)
        page.figure(seconds, label="time in the collective")


def _series(run: RunFacts, names: Mapping[str, str], factor: float) -> list[Series]:
    """Return a curve of each metric, times a factor; each has its own colour and dashes."""
    return [
        Series(name, [(step, factor * value) for step, value in run.series(key)], place, style)
        for place, ((name, key), style) in enumerate(zip(names.items(), _DASHES, strict=False))
    ]


def add_timeline(page: Page, runs: Sequence[RunFacts]) -> None:
    """Add the recorded steps of all ranks, and their memory."""
    page.section("Measured timeline")
    page.text(
        "What each rank did in some steps, by the clock of its host; on an accelerator these are "
        "the times at which work was launched. Clocks of several hosts may differ. Draw a frame to "
        "zoom into a part of the time; the last button shows all again. From timeline/."
    )
    for run in runs:
        if run.trace is None:
            why = "no steps were recorded (--trace_steps, or the run ended before)"
            page.missing(f"timeline of {run.name}", why)
        else:
            _add_steps(page, run, run.trace)


def _add_steps(page: Page, run: RunFacts, trace: Trace) -> None:
    first = trace.ranks[0]
    last = first.first_step + len(first.steps) - 1
    page.heading(f"Steps {first.first_step} to {last}: {run.name}")
    missing = int(run.environment.get("world_size", 0)) - len(trace.ranks)
    if missing > 0:
        page.missing("ranks", f"{missing} have left no timeline in this folder")
    height = _PIXELS_AROUND + _PIXELS_PER_RANK * len(trace.ranks)
    page.figure(gantt(trace), label="what each rank did, over time", height=height, zooms=True)
    resident = all(rank.device == "cpu" for rank in trace.ranks)
    page.heading(
        f"Memory over these steps: {run.name}",
        ("Resident memory of the process" if resident else "Allocated on the accelerator")
        + " at the end of whatever it did; from timeline/."
        + (" The axis does not begin at 0." if resident else ""),
    )
    series = [
        Series(
            f"rank {rank.rank}",
            [
                (round(1000 * s.end_s, 3), s.bytes / _MIB)
                for s in sorted(rank.spans, key=lambda span: span.end_s)
            ],
            rank.rank,
        )
        for rank in trace.ranks
    ]
    figure = lines(series, "memory (MiB)", x="time (ms)", zero=not resident)
    page.figure(figure, label="memory over time", height=280)


def _planned(run: RunFacts) -> str:
    """Return a sentence on the staleness by the plan."""
    layout = run.layout
    stages, size = int(layout["stages"]), int(layout.get("gradient_accumulation_steps", 1))
    most = [
        str(max_staleness(stage, stages, size, int(run.pipemare.get("slack", 0))))
        for stage in range(stages)
    ]
    return f"By the plan the staleness is at most {', '.join(most)} (stage 0 first)."
