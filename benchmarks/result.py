# SPDX-License-Identifier: Apache-2.0
"""Results as a table on the screen and as a picture; the same for all benchmarks."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.request import Request
from wavemare.observe.tables import Row, drawing, make_table, print_table

_MODELS = ("ideal", "model")
_LOG_SCALE_FROM = 8.0


def result_table(request: Request, result: Row) -> Table:
    """Return the table of a result's rows."""
    return make_table(
        request.title(result),
        request.columns,
        result["rows"],
        [request.case(row) for row in result["rows"]],
    )


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


def print_result(request: Request, result: Row) -> None:
    """Print the table and the remarks."""
    print_table(result_table(request, result))
    for line in request.remarks(result):
        print(line)
