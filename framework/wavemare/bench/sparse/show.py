"""A result on the screen and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

__all__ = ["plot", "result_table"]

_NOTHING = "-"
_PLOTTED = ("gloo-dense", "torch-sparse", "deepspeed-sparse")


def result_table(result: Mapping[str, Any]) -> Table:
    """Return a table of the rows; ratios are to the fastest dense system of the case.

    Args:
        result: As it is written to the file.
    """
    rows = result["rows"]
    where = f"{rows[0]['mbit']:g} Mbit/s" if rows[0]["mbit"] else "this machine's memory"
    table = Table(
        title=f"{rows[0]['ranks']} ranks over {where}, {result['mebibytes']:g} MiB float32, "
        f"blocks of {result['block']}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for heading in ("pattern", "density", "union"):
        table.add_column(heading, justify="right")
    table.add_column("system", no_wrap=True)
    for heading in ("ms", "ratio", "model", "MiB up", "used"):
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        following = rows[index + 1] if index + 1 < len(rows) else row
        ends = (row["pattern"], row["density"]) != (following["pattern"], following["density"])
        up = row.get("bytes_up")
        table.add_row(
            row["pattern"],
            f"{row['density']:g}",
            _cell(row.get("union"), ".3f"),
            row["system"],
            f"{1000 * row['median_s']:.1f}",
            _cell(row["ratio"], ".2f"),
            _cell(row.get("model"), ".2f"),
            _cell(None if up is None else up / 2**20, ".1f"),
            row.get("executor") or _NOTHING,
            end_section=ends,
        )
    return table


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Draw the ratio over the density, one panel for each pattern, with the model's lines.

    Args:
        result: As it is written to the file.
        file: PNG or SVG.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(patterns), figsize=(5 * len(patterns), 4.2), squeeze=False, sharey=True
    )
    names = dict.fromkeys(row["system"] for row in rows)
    systems = [name for name in names if name.startswith("wavemare-") or name in _PLOTTED]
    for axis, pattern in zip(axes[0], patterns, strict=True):
        axis.set_prop_cycle(color=[mpl.colormaps["tab20"](number) for number in range(20)])
        for system in systems:
            points = sorted(
                (row["density"], row["ratio"], row.get("model"))
                for row in rows
                # Where nothing is zero all patterns are one.
                if row["system"] == system and (row["pattern"] == pattern or row["density"] == 1)
            )
            (line,) = axis.plot(
                [p[0] for p in points], [p[1] for p in points], marker="o", ms=3, label=system
            )
            if system in {"wavemare-pushpull", "wavemare-allgather", "wavemare-packed"}:
                modelled = [(density, model) for density, _, model in points if model]
                densities, models = [m[0] for m in modelled], [m[1] for m in modelled]
                axis.plot(densities, models, ls=":", color=line.get_color())
        axis.axhline(1, color="grey", lw=0.8)
        axis.set(xscale="log", yscale="log", xlabel="density of blocks", title=pattern)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("times as fast as the fastest dense (dotted: model)")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _cell(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
