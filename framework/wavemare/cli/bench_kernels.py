"""``wavemare bench kernels``: the sparse collective's kernels beside memcpy, on one core."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from wavemare.errors import ConfigError

__all__ = ["kernels"]


def kernels(
    mib: Annotated[float, typer.Option(help="Size of the bucket in MiB.")] = 381.5,
    block: Annotated[int, typer.Option(help="Elements per block.")] = 256,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 7,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.")
    ] = None,
) -> None:
    """Measure mask, gather, scatter and ordered sum of float32 blocks, in turns with memcpy.

    For example: wavemare bench kernels --mib 100 --json kernels.json
    """
    for option, value in (("--mib", mib), ("--block", block), ("--rounds", rounds)):
        if not value > 0:
            raise ConfigError(option, value, "it is not positive", "Give more than 0")
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from wavemare.bench.kernels import measure_kernels
    from wavemare.bench.machine import describe_machine
    from wavemare.files import atomic_write_text

    rows = measure_kernels(max(int(mib * 2**20) // 4, block), block, rounds)
    table = Table("kernel", "density", "GB/s", "of memcpy", box=box.SIMPLE_HEAD)
    for row in rows:
        figures = (f"{row['density']:g}", f"{row['gb_s']:.1f}", f"{row['of_memcpy']:.2f}")
        table.add_row(row["kernel"], *figures)
    Console(highlight=False).print(table)
    if json_file is not None:
        command = shlex.join(["wavemare", *sys.argv[1:]])
        result = {
            "command": command,
            "machine": describe_machine(),
            "baseline": "memcpy",
            "rows": rows,
        }
        atomic_write_text(json_file, json.dumps(result, indent=1) + "\n")
