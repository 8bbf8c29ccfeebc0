# SPDX-License-Identifier: Apache-2.0
"""Sums over many ranks, from the rates of a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wavemare.bench.scaling.point import Point
from wavemare.bench.sparse.gradients import active_blocks
from wavemare.bench.sparse.request import DENSE, Case
from wavemare.comm.cost import IN_ORDER, Constants, predict
from wavemare.comm.masks import Masks

__all__ = ["SYSTEMS", "constants_for", "constants_of", "curves", "measured"]

_CHOICE = "wavemare-auto"
SYSTEMS = ("dense", _CHOICE)
_LIBRARY = "dense"
_FLOAT_BYTES = 4


def constants_of(result: Mapping[str, Any], transport: str) -> Constants:
    """Return what a run of ``bench sparse`` measured at its start."""
    return Constants(**result["constants"][transport])


def constants_for(known: Constants, known_ranks: int, ranks: int) -> Constants:
    """Return what other numbers of ranks would measure, each behind a link of its own.

    An exchange has N - 1 messages of each rank, a ring's reduction 2 (N - 1) one after another and
    2 (N - 1) / N of the bytes. The rate of a link and the kernels stay: the switch does not get
    slower (full bisection), and no rank shares its cores.
    """
    messages = (ranks - 1) / (known_ranks - 1)
    ring_bytes = (1 - 1 / ranks) / (1 - 1 / known_ranks)
    return replace(
        known,
        message_s=known.message_s * messages,
        dense_latency_s=known.dense_latency_s * messages,
        dense_s=known.dense_s * ring_bytes,
    )


def measured(results: Sequence[Mapping[str, Any]], case: Case, transport: str) -> list[Point]:
    """Return the fastest dense reduction and the collective's choice, as they were measured.

    Args:
        results: Contents of files of ``bench sparse``.
        case: Which gradients.
        transport: Which library's messages the collective's choice went by, ``mpi`` or ``gloo``.
    """
    name = _CHOICE if transport == "mpi" else f"{_CHOICE}-{transport}"
    points = []
    for result in results:
        rows = [
            r
            for r in result["rows"]
            if (r["pattern"], r["density"]) == (case.pattern, case.density)
        ]
        dense = [row for row in rows if row["system"] in DENSE]
        if dense:
            best = min(dense, key=lambda row: row["median_s"])
            points.append(Point("dense", best["ranks"], best["median_s"]))
        points += [
            Point(_CHOICE, row["ranks"], row["median_s"]) for row in rows if row["system"] == name
        ]
    return sorted(points, key=lambda point: (point.system, point.processes))


def curves(
    case: Case,
    counts: Sequence[int],
    known: Constants,
    known_ranks: int,
    *,
    num_blocks: int,
    block: int,
) -> tuple[list[Point], dict[int, str]]:
    """Return what sums take by the selector's own model, and which executor it would choose.

    Like the collective that is measured it chooses from those that sum in the order of the ranks.

    Args:
        case: Pattern and density of the gradients.
        counts: Numbers of ranks, ascending.
        known: Measured.
        known_ranks: With so many ranks.
        num_blocks: Of the bucket.
        block: Elements of a block.
    """
    bits = np.stack([_bits(case, num_blocks, rank) for rank in range(max(counts))])
    points, chosen = [], {}
    for ranks in counts:
        constants = constants_for(known, known_ranks, ranks)
        seconds = predict(Masks(bits[:ranks], num_blocks), block * _FLOAT_BYTES, constants)
        chosen[ranks] = min(IN_ORDER, key=seconds.__getitem__)
        points.append(Point("dense", ranks, seconds[_LIBRARY]))
        points.append(Point(_CHOICE, ranks, seconds[chosen[ranks]]))
    return points, chosen


def _bits(case: Case, num_blocks: int, rank: int) -> np.ndarray:
    mask = np.zeros(num_blocks, dtype=bool)
    mask[active_blocks(case, num_blocks, rank)] = True
    return np.packbits(mask, bitorder="little")
