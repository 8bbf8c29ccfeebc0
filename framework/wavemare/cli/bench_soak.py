# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench soak``: hours of training under faults."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from wavemare.cli.bench_shared import JsonFile, check_writable, print_wide, save

__all__ = ["problems", "soak"]

_LEAST_SHARE = 0.5
"""Of the planned faults that must happen: those that meet no rank, as it is starting, do not."""
_WIDTH = 110


def soak(
    systems: Annotated[
        str, typer.Option(help="pipemare, sparse, or both with a comma between.")
    ] = "pipemare,sparse",
    minutes: Annotated[float, typer.Option(help="Of each system.", min=0.5)] = 120.0,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
    warmup: Annotated[
        float, typer.Option(help="Seconds after a first step in which ranks may grow.", min=0)
    ] = 60.0,
    reference_steps: Annotated[
        int, typer.Option(help="Trained once more in peace, to compare the losses.", min=1)
    ] = 300,
    limit: Annotated[float, typer.Option(help="Share by which ranks may grow afterwards.")] = 0.01,
    folder: Annotated[Path, typer.Option(help="Gets a folder of its own for each run.")] = Path(
        "runs/soak"
    ),
    json_file: JsonFile = None,
) -> None:
    """Train with random pauses, deaths and slow links; compare losses, watch for growth.

    Fails if a step that was trained again had another loss, if ranks grew beyond the limit, if
    shared memory was left behind, or if there was nothing to compare or to watch.
    """
    from wavemare.bench.machine import describe_machine
    from wavemare.bench.options import check_names, parse_names
    from wavemare.bench.soak.run import SYSTEMS, Soak

    names = parse_names(systems)
    check_names("--systems", names, SYSTEMS)
    check_writable("--json", json_file)
    check_writable("--folder", folder, is_folder=True)
    rows = []
    started = time.strftime("%Y%m%d-%H%M%S")
    for name in names:
        place = folder / f"{name}-{started}"
        job = Soak(name, minutes, seed, place.resolve(), warmup, reference_steps, typer.echo)
        rows.append(job.run())
    _show(rows)
    save(json_file, {"machine": describe_machine(), "seed": seed, "rows": rows})
    if found := [problem for row in rows for problem in problems(row, limit)]:
        typer.echo("\n".join(found), err=True)
        raise typer.Exit(1)


def problems(row: dict[str, Any], limit: float) -> list[str]:
    """Return each promise that a system's soak has broken.

    Args:
        row: Of the report.
        limit: Share by which ranks may grow.
    """
    name = row["system"]
    found = []
    if row["exit_code"]:
        found.append(f"{name}: exit code {row['exit_code']}")
    for key in ("different_losses", "reference_differs"):
        if row[key]:
            found.append(f"{name}: {key.replace('_', ' ')}: {row[key]}")
    for key, growth in row["growth"].items():
        if growth is not None and growth >= limit:
            found.append(f"{name}: {key} grew by {growth:.1%}")
    if row["shared_memory_segments"] > 0:
        found.append(f"{name}: {row['shared_memory_segments']} segments of shared memory stay")
    return found + [f"{name}: nothing is shown: {each}" for each in _nothing_shown(row)]


def _nothing_shown(row: dict[str, Any]) -> list[str]:
    """Return why a soak that found nothing wrong has not looked."""
    faults = row["faults"]
    found = [f"no {kind} befell a rank" for kind in ("pause", "kill") if not faults[kind]]
    for kind, planned in row["planned_faults"].items():
        if faults[kind] < _LEAST_SHARE * planned:
            found.append(f"{faults[kind]} of {planned} planned faults ({kind}) happened")
    if faults["kill"] and not row["repeated_steps"]:
        found.append("no step was trained again after a death")
    if not row["reference_steps"]:
        found.append("no step was compared with a run in peace")
    if all(growth is None for growth in row["growth"].values()):
        found.append("no rank lived long enough to be watched after its warm-up")
    if not (row["last_loss"] or math.inf) < (row["first_loss"] or 0.0):
        found.append("the loss has not fallen")
    return found


def _show(rows: list[dict[str, Any]]) -> None:
    from wavemare.bench.table import add_numbers, new_table

    table = new_table(None, "")
    add_numbers(table, [row["system"] for row in rows])

    def line(name: str, texts: list[str]) -> None:
        table.add_row(name, *texts)

    line("steps", [str(row["steps"]) for row in rows])
    line("loss", [f"{row['first_loss']:.3f} to {row['last_loss']:.3f}" for row in rows])
    for kind in ("pause", "kill", "slow link"):
        line(kind, [str(row["faults"][kind]) for row in rows])
    line("steps trained again", [str(row["repeated_steps"]) for row in rows])
    line("with another loss", [str(row["different_losses"]) for row in rows])
    line("steps beside a run in peace", [str(row["reference_steps"]) for row in rows])
    line("with another loss", [str(row["reference_differs"]) for row in rows])
    for key in ("memory_mib", "files", "threads", "children"):
        line(f"growth of {key}", [_percent(row["growth"][key]) for row in rows])
    line("longest watch of a rank", [f"{row['longest_watch_s']:.0f} s" for row in rows])
    print_wide(table, _WIDTH)


def _percent(growth: float | None) -> str:
    return "too short" if growth is None else f"{growth:+.2%}"
