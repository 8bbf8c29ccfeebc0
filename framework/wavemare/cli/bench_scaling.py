# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench scaling``: from a few measured processes to many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wavemare.cli.bench_shared import JsonFile, Plot, check_results, print_wide, save
from wavemare.errors import ConfigError

__all__ = ["scaling"]

_WIDTH = 120


def scaling(
    pipeline: Annotated[
        list[Path] | None,
        typer.Option(help="Result of `bench pipeline --synthetic`; several times."),
    ] = None,
    sparse: Annotated[
        list[Path] | None, typer.Option(help="Result of `bench sparse`; several times.")
    ] = None,
    transport: Annotated[str, typer.Option(help="Whose rates: mpi or gloo.")] = "mpi",
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Predict up to 1,024 stages and ranks from the shortest measured run, beside all measured.

    The result with the fewest processes calibrates, all others are there to be compared.

    For example: wavemare bench scaling --pipeline 2.json --pipeline 4.json --plot scaling.png
    """
    from wavemare.bench.options import check_names
    from wavemare.bench.scaling.picture import draw
    from wavemare.bench.scaling.study import (
        PIPELINE_KEYS,
        SPARSE_KEYS,
        collective_rows,
        pipeline_rows,
        read_results,
    )

    check_names("--transport", [transport], ("mpi", "gloo"), "transport")
    if not pipeline and not sparse:
        remedy = "Run `wavemare bench pipeline --synthetic --json 2.json` and name 2.json"
        raise ConfigError("--pipeline", None, "there is nothing to begin with", remedy)
    check_results(json_file, plot)
    rows: list[dict[str, Any]] = []
    calibration: dict[str, Any] = {}
    if pipeline:
        results = read_results("--pipeline", pipeline, PIPELINE_KEYS)
        found, calibration["pipeline"] = pipeline_rows(results)
        rows += found
    if sparse:
        results = read_results("--sparse", sparse, SPARSE_KEYS)
        found, calibration["collective"] = collective_rows(results, transport)
        rows += found
    _show(rows)
    save(json_file, {"baseline": "deepspeed-1f1b, dense", "calibration": calibration, "rows": rows})
    if plot is not None:
        draw(plot, rows)


def _show(rows: list[dict[str, Any]]) -> None:
    """Print measured rows beside what was predicted for as many processes, and all predictions."""
    from wavemare.bench.table import add_numbers, new_table

    table = new_table(None, "", "system")
    add_numbers(table, ("processes", "ms", "ratio", "measured ms", "ratio", "off"))
    measured = {_key(row): row for row in rows if row["measured"]}
    for row in rows:
        if row["measured"]:
            continue
        other = measured.get(_key(row))
        off = f"{row['median_s'] / other['median_s'] - 1:+.1%}" if other is not None else ""
        table.add_row(
            _case(row),
            row["system"],
            str(row.get("stages", row.get("ranks"))),
            *_columns(row),
            *(_columns(other) if other is not None else ("", "")),
            "calibrates" if other is not None and other["calibrates"] else off,
        )
    print_wide(table, _WIDTH)


def _columns(row: dict[str, Any]) -> tuple[str, str]:
    ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else ""
    return f"{1e3 * row['median_s']:.1f}", ratio


def _case(row: dict[str, Any]) -> str:
    if row["part"] == "compute":
        return f"{1e3 * row['compute_s']:g} ms of compute"
    case = f"{row['pattern']} {row['density']:g}" if "pattern" in row else str(row["part"])
    return f"{case}, {row['mebibytes']} MiB" if row["part"] == "size" else case


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("part", "system", "stages", "ranks", "pattern", "density", "mebibytes", "compute_s")
    return tuple(row.get(name) for name in names)
