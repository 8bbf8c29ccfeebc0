"""A result as a table on the screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.table import Table

__all__ = ["result_table", "skipped_lines"]

_NOTHING = "-"


def _number(pattern: str) -> Callable[[float], str]:
    return lambda value: format(value, pattern)


_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "ms/step": ("median_s", lambda value: f"{1000 * value:.1f}"),
    "ratio": ("ratio", _number(".2f")),
    "ideal": ("ideal", _number(".2f")),
    "bound": ("bound_fraction", _number(".3f")),
    "waiting": ("waiting", _number(".1%")),
    "busy": ("busy", _number(".1%")),
}


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
    table = Table(
        title=_title(result),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("M", justify="right")
    table.add_column("system", no_wrap=True)
    for heading in shown:
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        cells = [_cell(row.get(key), form) for key, form in shown.values()]
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


def _cell(value: float | None, form: Callable[[float], str]) -> str:
    return _NOTHING if value is None else form(value)
