# SPDX-License-Identifier: Apache-2.0
"""Results as a table on the screen and as a picture; the same for all benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from wavemare.bench.request import Column, Request, Row

_NOTHING = "-"
_MODELS = ("ideal", "model")
_LOG_SCALE_FROM = 8.0
_WIDEST = 400


def result_table(request: Request, result: Row) -> Table:
    """Return the table of a result's rows."""
    return make_table(
        request.title(result),
        request.columns,
        result["rows"],
        [request.case(row) for row in result["rows"]],
    )


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


def draw(request: Request, result: Row, file: Path) -> None:
    """Draw the ratios of all systems over the cases; marks are the ideal or the model."""
    from matplotlib import colormaps

    rows = [row for row in result["rows"] if row.get("ratio") is not None]
    cases = list(dict.fromkeys(map(request.case, rows)))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    with drawing(file, figsize=(4 + 0.6 * len(cases) + 0.1 * len(systems), 4.5)) as axis:
        for number, system in enumerate(systems):
            own = [row for row in rows if row["system"] == system]
            color = colormaps["tab20"](number % 20)
            places = [cases.index(request.case(row)) for row in own]
            axis.plot(places, [row["ratio"] for row in own], "o-", ms=4, color=color, label=system)
            for key in _MODELS:
                marks = [(p, row[key]) for p, row in zip(places, own, strict=True) if row.get(key)]
                for place, value in marks:
                    axis.plot(place, value, marker="_", ms=14, color=color)
        axis.axhline(1, color="grey", lw=0.8)
        ratios = [row["ratio"] for row in rows]
        if ratios and max(ratios) > _LOG_SCALE_FROM * min(ratios):
            axis.set_yscale("log")
        axis.set_xticks(range(len(cases)), cases, rotation=30, ha="right", fontsize=8)
        axis.set_ylabel(f"ratio to {result['baseline']} (line: ideal or model)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


@contextmanager
def drawing(file: Path, **layout: Any) -> Iterator[Any]:
    """Write a picture of what the block draws.

    Yields:
        The axes, as ``subplots`` returns them.
    """
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


def print_result(request: Request, result: Row) -> None:
    """Print the table and the remarks."""
    print_table(result_table(request, result))
    for line in request.remarks(result):
        print(line)


def print_table(table: Table) -> None:
    """Print a table in full, whatever the width of the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    console.width = max(console.width, needed)
    console.print(table)
