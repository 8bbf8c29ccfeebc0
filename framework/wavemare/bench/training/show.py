# SPDX-License-Identifier: Apache-2.0
"""A result on the screen and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from wavemare.bench.picture import drawing
from wavemare.bench.table import NOTHING, add_numbers, cell, new_table

__all__ = ["draw", "result_table"]


def result_table(result: Mapping[str, Any]) -> Table:
    """Return a table of the rows.

    Args:
        result: As it is written to the file.
    """
    request = result["request"]
    where = f"{request['mbit']:g} Mbit/s" if request["mbit"] else "this machine's memory"
    table = new_table(
        f"{request['ranks']} ranks over {where}: BERT, {request['layers']} layers of "
        f"{request['hidden']}, {request['vocabulary']} tokens, "
        f"{request['batch']} x {request['sequence']} of {result['task']}"
    )
    table.add_column("system", no_wrap=True)
    if "quality" in result:
        return _fill_quality(table, result["quality"])
    headings = ("ms", "ratio", "comm ms", "ratio", "MiB up", "density", "union", "used")
    add_numbers(table, headings)
    for row in result["rows"]:
        up = row["bytes_up"] if row["link_bytes_up"] is None else row["link_bytes_up"]
        table.add_row(
            row["system"],
            f"{1000 * row['median_s']:.1f}",
            cell(row["ratio"], ".2f"),
            cell(row["communication_s"], ".1f", 1000),
            cell(row["communication_ratio"], ".2f"),
            cell(up, ".2f", 2**-20),
            cell(row["density"], ".3f"),
            cell(row["union"], ".3f"),
            row["executor"] or NOTHING,
        )
    return table


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw the times as bars, or the held-out losses as curves.

    Args:
        result: As it is written to the file.
        file: PNG or SVG.
    """
    with drawing(file, figsize=(8, 4.2)) as axis:
        if "quality" in result:
            _draw_curves(axis, result["quality"])
        else:
            _draw_bars(axis, result["rows"])


def _fill_quality(table: Table, rows: list[Mapping[str, Any]]) -> Table:
    add_numbers(table, ("held-out loss", "gap %", "same losses", "MiB up"))
    for row in rows:
        table.add_row(
            row["system"],
            f"{row['held_out']:.4f}",
            f"{row['gap_percent']:+.2f}",
            "yes" if row["same_losses"] else "no",
            cell(row["bytes_up"], ".1f", 2**-20),
        )
    return table


def _draw_bars(axis: Any, rows: list[Mapping[str, Any]]) -> None:
    names = [row["system"] for row in rows]
    whole = [1000 * row["median_s"] for row in rows]
    talking = [1000 * (row["communication_s"] or 0.0) for row in rows]
    computing = [all_ - part for all_, part in zip(whole, talking, strict=True)]
    axis.barh(names, computing, color="0.75", label="no communication")
    axis.barh(names, talking, left=computing, color="tab:blue", label="beyond it")
    for place, (value, row) in enumerate(zip(whole, rows, strict=True)):
        if row["ratio"] is not None:
            axis.text(value, place, f" {row['ratio']:.2f}x", va="center", fontsize=8)
    axis.margins(x=0.12)
    axis.invert_yaxis()
    axis.set_xlabel("ms per optimizer step")
    axis.legend(fontsize=8)


def _draw_curves(axis: Any, rows: list[Mapping[str, Any]]) -> None:
    for row in rows:
        steps, losses = zip(*row["curve"], strict=True)
        label = f"{row['system']}: {row['held_out']:.4f} ({row['gap_percent']:+.2f} %)"
        axis.plot(steps, losses, marker="o", ms=3, label=label)
    axis.set(xlabel="optimizer steps", ylabel="held-out loss")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
