# SPDX-License-Identifier: Apache-2.0
"""Results as a table on the screen, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from wavemare.extras import require

Row = Mapping[str, Any]
_NOTHING = "-"
_WIDEST = 400


class Column(NamedTuple):
    """A column of the printed table.

    Args:
        key: Of a row.
        form: Format of the value; empty for texts, which are left-aligned.
        factor: The value is multiplied by it.
    """

    key: str
    form: str = ""
    factor: float = 1.0


def make_table(
    title: str, columns: Mapping[str, Column], rows: Sequence[Row], groups: Sequence[str] = ()
) -> Table:
    """Return a table without the empty columns; a line stands between rows of two groups."""
    shown = {
        heading: column
        for heading, column in columns.items()
        if any(row.get(column.key) is not None for row in rows)
    }
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for heading, column in shown.items():
        table.add_column(heading, justify="right" if column.form else "left", no_wrap=True)
    for number, row in enumerate(rows):
        cells = [_cell(row.get(column.key), column) for column in shown.values()]
        ends = list(groups[number : number + 2])
        table.add_row(*cells, end_section=len(set(ends)) > 1)
    return table


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return _NOTHING
    if column.form:
        return format(column.factor * value, column.form)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@contextmanager
def drawing(file: Path, **layout: Any) -> Iterator[Any]:
    """Write a picture of what the block draws.

    Yields:
        The axes, as ``subplots`` returns them.

    Raises:
        LaunchError: matplotlib is not installed.
    """
    require("matplotlib", "A picture")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**layout)
    try:
        yield axes
        figure.tight_layout()
        figure.savefig(file, dpi=110)
    finally:
        pyplot.close(figure)


def print_table(table: Table) -> None:
    """Print a table in full, whatever the width of the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    console.width = max(console.width, needed)
    console.print(table)
