# SPDX-License-Identifier: Apache-2.0
"""The table at the top of a report: what a run was and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from wavemare.observe.formats import format_bytes, format_count
from wavemare.report.runs import RunFacts

__all__ = ["overview"]


def overview(runs: Sequence[RunFacts]) -> list[tuple[object, ...]]:
    """Return a row for each fact: its name and its value in each run."""
    columns = [_facts(run) for run in runs]
    return [(name, *(column[name] for column in columns)) for name in columns[0]]


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
        "tokens/s, median of logged steps": format_count(median(speed)) if speed else None,
        "bubble": _bubble(run),
        "most memory of a rank": format_bytes(max(memory)) if memory else None,
        "checkpoints": len(run.checkpoints),
        "warnings": _warnings(run),
    }


def _ended(run: RunFacts) -> str:
    results: Any = (run.summary or {}).get("results", {})
    if run.summary is None:
        return "not (no summary.json): it runs, or it was broken off"
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
