# SPDX-License-Identifier: Apache-2.0
"""The parts of a report on runs, each from what the run folders hold."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.filesize import decimal

from wavemare.observe.lines import numbered
from wavemare.pipeline.staleness.staleness import max_staleness
from wavemare.report.figures import Series, bars, gantt, lines
from wavemare.report.page import Page
from wavemare.report.runs import RunFacts, Trace

_DASHES = ("solid", "dash", "dot", "dashdot")
"""Of several runs, whose curves may coincide."""


def run_page(runs: Sequence[RunFacts]) -> str:
    """Return a page on a run, or on several side by side."""
    names = ", ".join(run.name for run in runs)
    title = f"Run {names}" if len(runs) == 1 else f"{len(runs)} runs compared"
    page = Page(title, "" if len(runs) == 1 else names)
    page.section("Overview")
    columns = [_facts(run) for run in runs]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    page.table(("", *(run.name for run in runs)), rows)
    for add in (
        _add_learning,
        _add_speed,
        add_pipeline,
        add_collective,
        add_timeline,
        _add_checkpoints,
        _add_warnings,
        _add_environment,
        _add_configuration,
    ):
        add(page, runs)
    return page.html()


def _curves(
    page: Page,
    runs: Sequence[RunFacts],
    metrics: dict[str, tuple[str, str]],
    y: str,
    missing: str,
    **options: Any,
) -> None:
    """Add a figure with metrics of all runs."""
    several = len(runs) > 1
    series = [
        Series(
            _label(run, name, several=several, alone=len(metrics) == 1),
            run.series(metric),
            group if several else place,
            _DASHES[group % len(_DASHES)] if several and style == "solid" else style,
        )
        for group, run in enumerate(runs)
        for place, (metric, (name, style)) in enumerate(metrics.items())
    ]
    first = next(iter(metrics))
    for run in runs:
        if not run.series(first):
            page.missing(f"{run.name}", f"{metrics[first][0]} is not recorded: {missing}")
    if any(each.points for each in series):
        page.figure(lines(series, y, **options), label=y)


def _add_learning(page: Page, runs: Sequence[RunFacts]) -> None:
    page.section("Learning")
    about = "As logged; recipes log the mean of the steps since the previous line; metrics.jsonl."
    page.heading("Loss", about)
    _curves(
        page,
        runs,
        {"loss": ("training", "solid"), "eval_loss": ("validation", "markers")},
        "loss (nats)",
        "no step has been logged",
    )
    page.heading("Learning rate", "At the logged step; metrics.jsonl.")
    rates = {"learning_rate": ("learning rate", "solid")}
    _curves(page, runs, rates, "learning rate", "no step has been logged", zero=True)
    page.heading("Gradient norm", "Before clipping, over all parameters; metrics.jsonl.")
    norms = {"grad_norm": ("gradient norm", "solid")}
    why = "the engine computes it only where gradients are clipped or ZeRO needs it"
    _curves(page, runs, norms, "gradient norm", why, zero=True)


def _add_speed(page: Page, runs: Sequence[RunFacts]) -> None:
    page.section("Speed")
    page.text("Tokens per second of all ranks, over the last 20 steps; metrics.jsonl.")
    speed = {"tokens_per_second": ("tokens/s", "solid")}
    why = "no step has been logged, or the tokens of a step were not given"
    _curves(page, runs, speed, "tokens per second", why, zero=True)


def _add_checkpoints(page: Page, runs: Sequence[RunFacts]) -> None:
    page.section("Checkpoints")
    rows = []
    for run in runs:
        waited = {event["tag"]: event["seconds"] for event in _events(run, "checkpoint", rank=0)}
        if not run.checkpoints:
            page.missing(run.name, "the folder has no checkpoint")
        for each in run.checkpoints:
            state = "complete" if each.complete else "NOT complete"
            seconds = waited.get(each.tag)
            rows.append(
                (
                    run.name,
                    each.tag + (" (latest)" if each.latest else ""),
                    each.saved[:19].replace("T", " ") or None,
                    decimal(each.bytes),
                    state,
                    None if seconds is None else f"{seconds:.1f} s",
                )
            )
    if rows:
        page.text(
            "What is saved, and how long the training waited for each; checkpoints/ or a Trainer's "
            "output_dir, and events/."
        )
        page.table(("run", "tag", "saved (UTC)", "size", "files", "training waited"), rows)


def _add_warnings(page: Page, runs: Sequence[RunFacts]) -> None:
    page.section("Warnings")
    for run in runs:
        found = _events(run, "warning")
        if found:
            page.text(f"{run.name}: {len(found)}, from events/.")
            page.table(
                ("step", "rank", "from", "text"),
                [(e["step"], e["rank"], e.get("source"), e.get("text")) for e in found],
            )
        elif run.events:
            page.text(f"{run.name}: none.")
        else:
            page.missing(run.name, "warnings are not recorded: there are no events")
        for name, text in run.reports.items():
            page.details(f"{run.name}: the watchdog's report {name}", text)


def _add_environment(page: Page, runs: Sequence[RunFacts]) -> None:
    page.section("Environment")
    known = [flat({**run.environment, "command": _command(run)}) for run in runs]
    for run in runs:
        if not run.environment:
            page.missing(run.name, "there is no config.json")
    keys = dict.fromkeys(key for values in known for key in values)
    if keys:
        rows = [(key, *(values.get(key) for values in known)) for key in keys]
        page.table(("", *(run.name for run in runs)), rows)


def _add_configuration(page: Page, runs: Sequence[RunFacts]) -> None:
    page.section("Configuration")
    if len(runs) > 1:
        rows = differences([run.configuration for run in runs])
        page.heading(
            "Differences", "Keys of config.json whose values are not the same in all runs."
        )
        if rows:
            page.table(("key", *(run.name for run in runs)), rows)
        else:
            page.text("There are none.")
    for run in runs:
        if run.configuration:
            text = json.dumps(run.configuration, indent=2)
            page.details(f"{run.name}: the resolved configuration", text)
        else:
            page.missing(run.name, "there is no config.json")


def _label(run: RunFacts, name: str, *, several: bool, alone: bool) -> str:
    if not several:
        return name
    return run.name if alone else f"{run.name}: {name}"


def _events(run: RunFacts, kind: str, *, rank: int | None = None) -> list[dict[str, Any]]:
    return [e for e in run.events if e["kind"] == kind and rank in (None, e["rank"])]


def _command(run: RunFacts) -> str | None:
    words = run.environment.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else None


def _facts(run: RunFacts) -> dict[str, object]:
    loss, validation = run.series("loss"), run.series("eval_loss")
    speed = [value for _, value in run.series("tokens_per_second")]
    memory = [event["bytes"] for event in run.events if event["kind"] == "memory"]
    layout = run.layout
    return {
        "ended": _ended(run),
        "folder": str(run.folder),
        "started (UTC)": str(run.environment.get("started", ""))[:19].replace("T", " ") or None,
        "processes": run.environment.get("world_size"),
        "schedule": layout["schedule"] or None,
        "stages": layout["stages"],
        "samples per step": layout.get("train_batch_size"),
        "micro-batches per step": layout.get("gradient_accumulation_steps"),
        "last step logged": max((line["step"] for line in run.metrics), default=None),
        "last training loss (nats)": _last(loss),
        "last validation loss (nats)": _last(validation),
        "tokens/s, median of logged steps": f"{median(speed):,.0f}" if speed else None,
        "bubble": _bubble(run),
        "most memory of a rank": decimal(max(memory)) if memory else None,
        "checkpoints": len(run.checkpoints),
        "warnings": _warnings(run),
    }


def _ended(run: RunFacts) -> str:
    results: Any = (run.summary or {}).get("results", {})
    if run.summary is None:
        return "not yet (no summary.json): it runs, or it was aborted"
    stopped = results.get("stopped_after") if isinstance(results, dict) else None
    return f"stopped after step {stopped}" if stopped is not None else "as planned"


def _warnings(run: RunFacts) -> object:
    if not run.events:
        return None
    count = sum(event["kind"] == "warning" for event in run.events)
    reports = len(run.reports)
    return f"{count}, and {reports} reports of the watchdog" if reports else count


def _last(points: list[tuple[int, float]]) -> str | None:
    return f"{points[-1][1]:.4f} (step {points[-1][0]})" if points else None


def _bubble(run: RunFacts) -> str | None:
    if run.layout["stages"] == 1:
        return "no pipeline"
    shares = [share for _, share in run.series("bubble")]
    if shares:
        return f"{sum(shares) / len(shares):.1%} (mean of logged steps)"
    share = run.trace.bubble if run.trace is not None else None
    return None if share is None else f"{share:.1%} (in the noted steps)"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested objects by their dotted names; lists are values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(configurations: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """Return the keys that differ.

    Args:
        configurations: Nested objects.

    Returns:
        For each dotted key whose value is not the same in all of them, the key and its values; None
        where a configuration has no such key, and ``null`` where it says so.
    """
    known = [flat(each) for each in configurations]
    keys = dict.fromkeys(key for each in known for key in each)
    rows: list[tuple[object, ...]] = []
    for key in keys:
        present = [key in each for each in known]
        values = [each.get(key) for each in known]
        if not all(present) or any(value != values[0] for value in values):
            shown = ("null" if h and v is None else v for h, v in zip(present, values, strict=True))
            rows.append((key, *shown))
    return rows


_MIB = 2**20
_CALLS = "sparse_calls_"
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
    series = _series(run, {"measured": "bubble", "by unevenness": "bubble_predicted"}, 100)
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
    count, slack = int(run.layout["stages"]), int(run.pipemare.get("slack", 0))
    size = int(run.layout.get("gradient_accumulation_steps", 1))
    most = [str(max_staleness(stage, count, size, slack)) for stage in range(count)]
    page.heading(
        f"Staleness: {run.name}",
        "Optimizer steps between a micro-batch's forward and backward pass, mean of the step, by "
        f"stage; metrics.jsonl. By the plan it is at most {', '.join(most)} (stage 0 first).",
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
