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
    ("size", "mebibytes", "8 ranks: MiB of gradients"),
)


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
            _draw_part(plot, [row for row in rows if row["part"] == part], axis)
            plot.set_title(title, fontsize=10)
        for plot in axes.flat[len(parts) :]:
            plot.set_visible(False)


def _draw_part(plot: Any, rows: Sequence[dict[str, Any]], axis: str) -> None:
    names = sorted({_name(row) for row in rows if row["system"].startswith("wavemare")})
    for name in names:
        own = [row for row in rows if _name(row) == name and row["ratio"] is not None]
        lines = [(row[axis], row["ratio"]) for row in own if not row["measured"]]
        (line,) = plot.plot(*zip(*lines, strict=True), label=name)
        if points := [(row[axis], row["ratio"]) for row in own if row["measured"]]:
            plot.plot(*zip(*points, strict=True), "o", color=line.get_color())
    plot.axhline(1, color="grey", linewidth=0.8)
    plot.set_xscale("log", base=10 if axis == "compute_s" else 2)
    plot.set_xlabel({"compute_s": "seconds", "mebibytes": "MiB"}.get(axis, axis))
    plot.set_ylabel("times as fast as the baseline")
    plot.set_ylim(bottom=0)
    plot.legend(fontsize=8)


def _name(row: dict[str, Any]) -> str:
    if "pattern" in row:
        return f"{row['system']}, {row['pattern']} {row['density']:g}"
    return str(row["system"])
