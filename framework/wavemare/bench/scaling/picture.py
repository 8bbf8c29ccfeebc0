# SPDX-License-Identifier: Apache-2.0
"""The study as a picture: lines are predicted, points measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wavemare.bench.picture import drawing

__all__ = ["draw"]

_PARTS = (
    ("stages", "stages", "Optimizer step, as many micro-batches as stages"),
    ("compute", "compute_s", "8 stages: seconds of a micro-batch on a stage"),
    ("ranks", "ranks", "Sum of gradients, links alike"),
    ("density", "density", "Sum of gradients: share of the blocks that are not zero, random"),
    ("size", "mebibytes", "8 ranks: MiB of gradients"),
)
_RANKS = (2, 4, 8, 32, 128, 1024)
"""Of the lines over the density."""


def draw(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw ratios to the baseline: stock 1F1B, or a dense reduction.

    Args:
        file: PNG or SVG.
        rows: Of the study.
    """
    parts = [part for part in _PARTS if any(row["part"] == part[0] for row in rows)]
    columns = min(2, len(parts))
    layout = {"nrows": -(-len(parts) // 2), "ncols": columns, "squeeze": False}
    with drawing(file, **layout, figsize=(6 * columns, 4 * layout["nrows"])) as axes:
        for (part, axis, title), plot in zip(parts, axes.flat, strict=False):
            _draw_part(plot, _rows_of(part, rows), part, axis)
            plot.set_title(title, fontsize=10)
        for plot in axes.flat[len(parts) :]:
            plot.set_visible(False)


def _rows_of(part: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a plot shows; some densities stand among the rows over ranks already."""
    if part != "density":
        return [row for row in rows if row["part"] == part]
    found = [row for row in rows if row["part"] in ("ranks", part) and row["ranks"] in _RANKS]
    random = [row for row in found if row.get("pattern") == "random"]
    return sorted(random, key=lambda row: (row["ranks"], row["density"]))


def _draw_part(plot: Any, rows: Sequence[dict[str, Any]], part: str, axis: str) -> None:
    ours = [row for row in rows if row["system"].startswith("wavemare")]
    for name in dict.fromkeys(_name(row, part) for row in sorted(ours, key=_order)):
        own = [row for row in ours if _name(row, part) == name and row["ratio"] is not None]
        lines = [(row[axis], row["ratio"]) for row in own if not row["measured"]]
        (line,) = plot.plot(*zip(*lines, strict=True), label=name)
        if points := [(row[axis], row["ratio"]) for row in own if row["measured"]]:
            plot.plot(*zip(*points, strict=True), "o", color=line.get_color())
    plot.axhline(1, color="grey", linewidth=0.8)
    plot.set_xscale("log", base=2 if axis not in ("compute_s", "density") else 10)
    plot.set_xlabel({"compute_s": "seconds", "mebibytes": "MiB"}.get(axis, axis))
    plot.set_ylabel("times as fast as the baseline")
    plot.set_ylim(bottom=0)
    plot.legend(fontsize=8)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the place of a row's line in the legend."""
    return row["system"], row.get("pattern", ""), row.get("ranks", 0)


def _name(row: dict[str, Any], part: str) -> str:
    if part == "density":
        return f"{row['system']}, {row['ranks']} ranks"
    if "pattern" in row:
        return f"{row['system']}, {row['pattern']} {row['density']:g}"
    return str(row["system"])
