# SPDX-License-Identifier: Apache-2.0
"""A result on the screen and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from wavemare.bench.picture import drawing
from wavemare.bench.table import NOTHING, add_numbers, cell, new_table, with_ends

__all__ = ["draw", "result_table"]

_PLOTTED = ("gloo-dense", "torch-sparse", "deepspeed-sparse")
_MODELLED = ("wavemare-pushpull", "wavemare-allgather", "wavemare-packed")


def result_table(result: Mapping[str, Any]) -> Table:
    """Return a table of the rows; ratios are to the fastest dense system of the case.

    Args:
        result: As it is written to the file.
    """
    rows = result["rows"]
    where = f"{rows[0]['mbit']:g} Mbit/s" if rows[0]["mbit"] else "this machine's memory"
    table = new_table(
        f"{rows[0]['ranks']} ranks over {where}, {result['mebibytes']:g} MiB float32, "
        f"blocks of {result['block']}"
    )
    add_numbers(table, ("pattern", "density", "union"))
    table.add_column("system", no_wrap=True)
    add_numbers(table, ("ms", "ratio", "model", "MiB up", "used"))
    for row, ends in with_ends(rows, lambda row: (row["pattern"], row["density"])):
        table.add_row(
            row["pattern"],
            f"{row['density']:g}",
            cell(row.get("union"), ".3f"),
            row["system"],
            f"{1000 * row['median_s']:.1f}",
            cell(row["ratio"], ".2f"),
            cell(row.get("model"), ".2f"),
            cell(row.get("bytes_up"), ".1f", 2**-20),
            row.get("executor") or NOTHING,
            end_section=ends,
        )
    return table


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw the ratio over the density, one panel for each pattern, with the model's lines.

    Args:
        result: As it is written to the file.
        file: PNG or SVG.
    """
    from matplotlib import colormaps

    rows = result["rows"]
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    names = dict.fromkeys(row["system"] for row in rows)
    systems = [name for name in names if name.startswith("wavemare-") or name in _PLOTTED]
    size = (5 * len(patterns), 4.2)
    with drawing(file, ncols=len(patterns), figsize=size, squeeze=False, sharey=True) as axes:
        for axis, pattern in zip(axes[0], patterns, strict=True):
            axis.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
            for system in systems:
                # Where nothing is zero all patterns are one.
                own = [r for r in rows if r["pattern"] == pattern or r["density"] == 1]
                _draw_system(axis, system, [row for row in own if row["system"] == system])
            axis.axhline(1, color="grey", lw=0.8)
            axis.set(xscale="log", yscale="log", xlabel="density of blocks", title=pattern)
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("times as fast as the fastest dense (dotted: model)")
        axes[0][-1].legend(fontsize=7)


def _draw_system(axis: Any, system: str, rows: Sequence[Mapping[str, Any]]) -> None:
    points = sorted((row["density"], row["ratio"], row.get("model")) for row in rows)
    densities, ratios = [p[0] for p in points], [p[1] for p in points]
    (line,) = axis.plot(densities, ratios, marker="o", ms=3, label=system)
    if system in _MODELLED:
        modelled = [(density, model) for density, _, model in points if model]
        densities, models = [m[0] for m in modelled], [m[1] for m in modelled]
        axis.plot(densities, models, ls=":", color=line.get_color())
