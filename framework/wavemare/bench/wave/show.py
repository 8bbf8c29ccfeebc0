# SPDX-License-Identifier: Apache-2.0
"""A result on the screen and as a picture; the memory of a step as another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from wavemare.bench.picture import drawing
from wavemare.bench.table import add_numbers, cell, new_table, with_ends
from wavemare.bench.wave.live import Moment
from wavemare.bench.wave.request import SYSTEMS

__all__ = ["draw", "draw_memory", "memory_table", "remarks", "result_table"]

_MIB = 2**20
_BAR = 0.2


def result_table(result: Mapping[str, Any]) -> Table:
    """Return a table of the times.

    Args:
        result: As it is written to the file.
    """
    request = result["request"]
    table = new_table(
        f"{request['ranks']} ranks, {request['micro_batches']} micro-batches of "
        f"{request['batch']} x {request['sequence']}: GPT, {request['layers']} layers of "
        f"{request['hidden']}, split by tensors"
    )
    add_numbers(table, ("exposed", "measured", "Mbit/s"))
    table.add_column("system", no_wrap=True)
    add_numbers(table, ("ms", "ratio", "model", "waiting"))
    for row, ends in with_ends(result["rows"], lambda row: row["exposed"]):
        table.add_row(
            f"{row['exposed']:.0%}",
            f"{row['measured_exposed']:.1%}",
            cell(row["mbit"], ".0f"),
            row["system"],
            f"{1000 * row['median_s']:.0f}",
            f"{row['ratio']:.3f}",
            f"{row['model']:.3f}",
            f"{row['waiting']:.1%}",
            end_section=ends,
        )
    return table


def memory_table(result: Mapping[str, Any]) -> Table:
    """Return a table of what autograd keeps, and of how gradients compare.

    Args:
        result: As it is written to the file.
    """
    table = new_table("bytes that autograd keeps, and gradients")
    table.add_column("system", no_wrap=True)
    add_numbers(table, ("peak MiB", "of accumulation", "of in-phase", "bitwise"))
    for row in result["memory"]:
        table.add_row(
            row["system"],
            f"{row['peak_bytes'] / _MIB:.1f}",
            f"{row['of_accumulation']:.3f}",
            f"{row['of_in_phase']:.3f}",
            "yes" if row["bitwise"] else "no",
        )
    return table


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Return lines: what mode ``auto`` would do in each setting, and what other programs did."""
    steps = result["steps"]
    disturbed = [f"{steps['disturbed']} steps count though other programs took part of the cores"]
    return [
        f"auto at {verdict['exposed']:.0%}: {'on' if verdict['on'] else 'off'}, {verdict['reason']}"
        for verdict in result["auto"]
    ] + (disturbed if steps["disturbed"] else [])


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw the ratios as bars, one group for each setting, with the model's as marks.

    Args:
        result: As it is written to the file.
        file: PNG or SVG.
    """
    rows = result["rows"]
    shares = {row["exposed"]: row["measured_exposed"] for row in rows}
    with drawing(file, figsize=(8, 4.2)) as axis:
        for number, name in enumerate(SYSTEMS):
            own = {row["exposed"]: row for row in rows if row["system"] == name}
            places = [place + (number - 1.5) * _BAR for place in range(len(shares))]
            ratios = [own[share]["ratio"] for share in shares]
            bars = axis.bar(places, ratios, _BAR, label=name)
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
            models = [own[share]["model"] for share in shares]
            label = "model" if name == SYSTEMS[-1] else None
            axis.plot(places, models, ls="", marker="_", ms=14, color="black", label=label)
        axis.axhline(1, color="grey", lw=0.8)
        axis.set_xticks(range(len(shares)), [f"{shares[share]:.0%}" for share in shares])
        axis.set_xlabel("exposed collectives, measured in accumulation")
        axis.set_ylabel("times as fast as accumulation")
        axis.set_ylim(bottom=0.8)
        axis.legend(fontsize=8, loc="upper left")


def draw_memory(curves: Mapping[str, Sequence[Moment]], name: str, file: Path) -> None:
    """Draw what a step keeps, by wave and together, with the sums of the other systems.

    Args:
        curves: For each system what is kept after each action.
        name: Of the system whose waves are shown.
        file: PNG or SVG.
    """
    with drawing(file, figsize=(9, 4.2)) as axis:
        for other, curve in curves.items():
            if other != name:
                axis.plot(*_line(curve, lambda m: m.live.total), lw=0.8, ls=":", label=other)
        own = curves[name]
        axis.plot(*_line(own, lambda m: m.live.tick), color="tab:blue", lw=1, label="tick")
        axis.plot(*_line(own, lambda m: m.live.tock), color="tab:orange", lw=1, label="tock")
        axis.plot(*_line(own, lambda m: m.live.total), color="black", label=f"{name}: both")
        axis.set(xlabel="share of the step's passes", ylabel="MiB that autograd keeps")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, loc="upper right")


def _line(curve: Sequence[Moment], of: Any) -> tuple[list[float], list[float]]:
    places = [number / len(curve) for number in range(1, len(curve) + 1)]
    return places, [of(moment) / _MIB for moment in curve]
