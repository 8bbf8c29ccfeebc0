# SPDX-License-Identifier: Apache-2.0
"""A result on the screen and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from wavemare.bench.picture import drawing
from wavemare.bench.table import add_numbers, cell, new_table, with_ends
from wavemare.bench.whale.request import CHOICE, PLANNED, SHARES

__all__ = ["draw", "result_table"]


def result_table(result: Mapping[str, Any]) -> Table:
    """Return a table of all rows.

    Args:
        result: As it is written to the file.
    """
    request = result["request"]
    table = new_table(
        f"unlike devices by {result['throttle']}: GPT, {request['layers']} layers of "
        f"{request['hidden']}, micro-batches of {request['batch']} x {request['sequence']}"
    )
    for heading in ("part", "devices", "system"):
        table.add_column(heading, no_wrap=True)
    table.add_column("shares or cuts")
    add_numbers(table, ("ms", "predicted", "ratio", "ideal", "of it"))
    for row, ends in with_ends(result["rows"], _group):
        table.add_row(
            _kind(row),
            " ".join(f"{share:.2f}" for share in row["devices"]),
            row["system"] + (" (chosen)" if row.get("chosen") else ""),
            ",".join(map(str, row.get("cuts") or row["shares"])),
            f"{1000 * row['median_s']:.0f}",
            cell(row["predicted_s"], ".0f", 1000),
            f"{row['ratio']:.3f}",
            f"{row['ideal']:.3f}",
            f"{row['bound_fraction']:.1%}",
            end_section=ends,
        )
    return table


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw the ratios of planned and chosen jobs as bars, with what is possible as marks.

    Args:
        result: As it is written to the file.
        file: PNG or SVG.
    """
    rows = [row for row in result["rows"] if row["system"] == PLANNED or row.get("chosen")]
    names = [_name(row) for row in rows]
    with drawing(file, figsize=(2 + 0.9 * len(rows), 4.2)) as axis:
        bars = axis.bar(names, [row["ratio"] for row in rows], 0.6, label="planned, measured")
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
        bounds = [row["ideal"] for row in rows]
        axis.plot(names, bounds, ls="", marker="_", ms=24, color="black", label="bound")
        axis.axhline(1, color="grey", lw=0.8)
        axis.set_ylabel("times as fast as equal parts; choice: as the best")
        # Room for the legend above the highest mark.
        highest = max(*bounds, *(row["ratio"] for row in rows))
        axis.set_ylim(0.8, highest + 0.2 * (highest - 0.8) + 0.1)
        axis.tick_params(axis="x", labelsize=7)
        axis.legend(fontsize=8, loc="upper right")


def _kind(row: Mapping[str, Any]) -> str:
    """Return the schedule, the cluster or the part that a row is about."""
    return str(row.get("schedule") or row.get("cluster") or row["part"])


def _group(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return _kind(row), row["devices"]


def _name(row: Mapping[str, Any]) -> str:
    if row["part"] == SHARES:
        return f"shares\n{row['ranks']} ranks"
    if row["part"] == CHOICE:
        return f"choice\n{row['cluster']}\n{row['system']}"
    return f"{row['schedule']}\n{row['ranks']} stages\nrank {row['slow']} slow"
