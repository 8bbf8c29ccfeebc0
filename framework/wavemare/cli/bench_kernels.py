# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench kernels``: the sparse collective's kernels beside memcpy, on one core."""

from __future__ import annotations

from typing import Annotated

import typer

from wavemare.cli.bench_shared import JsonFile, Rounds, check_writable, print_wide, save

__all__ = ["kernels"]

_WIDTH = 80


def kernels(
    mib: Annotated[float, typer.Option(help="Size of the bucket in MiB.")] = 381.5,
    block: Annotated[int, typer.Option(help="Elements per block.")] = 256,
    rounds: Rounds = 7,
    json_file: JsonFile = None,
) -> None:
    """Measure mask, gather, scatter and ordered sum of float32 blocks, in turns with memcpy.

    For example: wavemare bench kernels --mib 100 --json kernels.json
    """
    from wavemare.bench.options import check_positive

    check_positive({"--mib": mib, "--block": block, "--rounds": rounds})
    check_writable("--json", json_file)
    from wavemare.bench.kernels import measure_kernels
    from wavemare.bench.machine import describe_machine
    from wavemare.bench.table import add_numbers, new_table

    rows = measure_kernels(max(int(mib * 2**20) // 4, block), block, rounds)
    table = new_table(None, "kernel")
    add_numbers(table, ("density", "GB/s", "of memcpy"))
    for row in rows:
        figures = (f"{row['density']:g}", f"{row['gb_s']:.1f}", f"{row['of_memcpy']:.2f}")
        table.add_row(row["kernel"], *figures)
    print_wide(table, _WIDTH)
    save(json_file, {"machine": describe_machine(), "baseline": "memcpy", "rows": rows})
