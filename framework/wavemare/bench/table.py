# SPDX-License-Identifier: Apache-2.0
"""Results as tables on the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

__all__ = [
    "NOTHING",
    "add_numbers",
    "cell",
    "new_table",
    "result_table",
    "skipped_lines",
    "with_ends",
]

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


def new_table(title: str | None = None, *headings: str) -> Table:
    """Return a table without rows in the style of all results.

    Args:
        title: Above it.
        headings: Of columns whose cells stand at the left; more may be added.
    """
    return Table(
        *headings,
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )


def add_numbers(table: Table, headings: Iterable[str]) -> None:
    """Add columns whose cells stand at the right."""
    for heading in headings:
        table.add_column(heading, justify="right")


def with_ends(
    rows: Sequence[Mapping[str, Any]], group: Callable[[Mapping[str, Any]], object]
) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield each row, and whether the one after it is of another group."""
    for row, following in zip(rows, [*rows[1:], rows[-1]] if rows else [], strict=True):
        yield row, group(row) != group(following)


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
    add_numbers(table, shown)
    for row, ends in with_ends(rows, lambda row: row["micro_batches"]):
        cells = [cell(row.get(key), form, factor) for key, form, factor in shown.values()]
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
