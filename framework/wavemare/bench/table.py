# SPDX-License-Identifier: Apache-2.0
"""Results as tables on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

__all__ = ["NOTHING", "cell", "new_table", "result_table", "skipped_lines"]

NOTHING = "-"
"""Stands for a value that there is not."""


_COLUMNS = {
    "ms/step": ("median_s", ".1f", 1000.0),
    "ratio": ("ratio", ".2f", 1.0),
    "ideal": ("ideal", ".2f", 1.0),
    "bound": ("bound_fraction", ".3f", 1.0),
    "waiting": ("waiting", ".1%", 1.0),
    "busy": ("busy", ".1%", 1.0),
}
"""By heading: the key in a row, the format and the factor of its value."""


def new_table(title: str) -> Table:
    """Return an empty table in the style of all results."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )


def cell(value: float | None, form: str, factor: float = 1.0) -> str:
    """Return the text of a value, scaled; `NOTHING` if it is None."""
    return NOTHING if value is None else format(factor * value, form)


def result_table(result: Mapping[str, Any]) -> Table:
    """Return the table of a result's rows; columns that no row fills are left out.

    Args:
        result: As it is written to the file.
    """
    rows = result["rows"]
    shown = {
        heading: column
        for heading, column in _COLUMNS.items()
        if any(row.get(column[0]) is not None for row in rows)
    }
    table = new_table(_title(result))
    table.add_column("M", justify="right")
    table.add_column("system", no_wrap=True)
    for heading in shown:
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        cells = [cell(row.get(key), form, factor) for key, form, factor in shown.values()]
        following = rows[index + 1] if index + 1 < len(rows) else None
        ends = following is not None and following["micro_batches"] != row["micro_batches"]
        table.add_row(str(row["micro_batches"]), row["system"], *cells, end_section=ends)
    return table


def skipped_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each system that was left out, with the reason."""
    return [
        f"{row['system']} at M={row['micro_batches']} is left out: {row['reason']}"
        for row in result["skipped"]
    ]


def _title(result: Mapping[str, Any]) -> str:
    stages = ", ".join(f"{1000 * seconds:.1f}" for seconds in result["stage_s"])
    return (
        f"{len(result['stage_s'])} stages of {stages} ms per micro-batch "
        f"(the slowest is {result['imbalance']:.1%} above the mean)"
    )
