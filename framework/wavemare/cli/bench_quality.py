# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench quality``: what asynchronous pipelines learn, method by method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wavemare.cli.bench_shared import (
    JsonFile,
    Plot,
    check_results,
    check_writable,
    print_wide,
    save,
)
from wavemare.cli.recipes import find_recipe

__all__ = ["quality"]

_WIDTH = 110


def quality(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt or bert.", show_default=False)],
    systems: Annotated[
        str, typer.Option(help="Names, with commas between; all by default.")
    ] = "all",
    stages: Annotated[int, typer.Option(help="Length of the pipeline.")] = 8,
    micro_batches: Annotated[int, typer.Option(help="Per optimizer step.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 800,
    seeds: Annotated[int, typer.Option(help="Runs of each system.")] = 3,
    jobs: Annotated[int, typer.Option(help="Simulations at a time.")] = 1,
    runs: Annotated[
        Path, typer.Option(help="Folder of the runs; those that are there are not repeated.")
    ] = Path("runs/quality"),
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Simulate pipelines, and compare held-out losses with synchronous training at equal tokens.

    Options that are not listed here go to each simulation (see wavemare simulate gpt -- --help):

    wavemare bench quality gpt --stages 4 --micro-batches 4 --systems flush,auto --num-layers 4
    """
    from wavemare.bench.machine import describe_machine
    from wavemare.bench.options import check_names, check_positive, parse_names
    from wavemare.bench.quality import SYSTEMS, draw, simulate_all, to_row

    find_recipe(recipe)
    counts = {"--stages": stages, "--micro-batches": micro_batches, "--steps": steps}
    check_positive({**counts, "--seeds": seeds, "--jobs": jobs})
    names = tuple(SYSTEMS) if systems == "all" else parse_names(systems)
    check_names("--systems", names, SYSTEMS)
    check_results(json_file, plot)
    check_writable("--runs", runs, is_folder=True)
    found = simulate_all(
        names,
        range(seeds),
        recipe=recipe,
        stages=stages,
        micro_batches=micro_batches,
        steps=steps,
        options=context.args,
        folder=runs,
        jobs=jobs,
        note=typer.echo,
    )
    parameters = {"stages": stages, "micro_batches": micro_batches, "steps": steps}
    rows = [to_row(name, found, **parameters) for name in names]
    _show(rows)
    if plot is not None:
        draw(plot, found, f"{recipe}, {stages} stages, {micro_batches} micro-batches per step")
    bigram = found[0]["bigram"]
    answer = {"machine": describe_machine(), "baseline": "flush", "bigram": bigram, "rows": rows}
    save(json_file, {**answer, "runs": found}, indent=0)


def _show(rows: list[dict[str, Any]]) -> None:
    from wavemare.bench.table import add_numbers, new_table

    table = new_table(None, "system")
    numbers = ("held-out loss", "gap", "gap to its own", "steps to flush", "memory")
    add_numbers(table, numbers)
    for row in rows:
        reached, memory = row["steps_to_flush"], row["memory"]
        table.add_row(
            row["system"],
            f"{row['held_out_loss']:.4f} ± {row['deviation']:.4f}",
            _percent(row["gap"]),
            _percent(row["own_gap"]),
            "never" if reached is None else f"{reached:.0f}",
            f"{memory['optimizer']:.2f} + {memory['correction']:.2f}",
        )
    print_wide(table, _WIDTH)


def _percent(gap: float | None) -> str:
    return "" if gap is None else f"{gap:+.2%}"
