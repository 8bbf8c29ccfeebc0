# SPDX-License-Identifier: Apache-2.0
"""From the times of all rounds to the rows of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from wavemare.bench.sparse.gradients import active_blocks
from wavemare.bench.sparse.request import DENSE, Case, SparseRequest
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.selection.cost import Constants, traffic
from wavemare.comm.statistics import Statistics

__all__ = ["KERNEL_PHASES", "Measured", "Sample", "build_result"]

KERNEL_PHASES = ("mask", "plan", "pack", "reduce", "unpack")
"""What is no message."""
BASELINE = "best-dense"


class Sample(NamedTuple):
    """One call.

    Args:
        seconds: Of the slowest rank.
        statistics: What rank 0 noted; None for other systems than wavemare's.
        summed: What the call returned, for as long as it is needed.
    """

    seconds: float
    statistics: Statistics | None
    summed: Any


Measured = dict[Case, dict[str, list[Sample]]]


def build_result(
    request: SparseRequest,
    measured: Measured,
    constants: Mapping[str, Constants],
) -> dict[str, Any]:
    """Return all that is written to the file, but for command and machine."""
    return {
        "baseline": BASELINE,
        "mebibytes": request.mebibytes,
        "block": request.block,
        "constants": {kind: asdict(values) for kind, values in constants.items()},
        "rows": [
            _row(request, case, name, rounds, systems)
            for case, systems in measured.items()
            for name, rounds in systems.items()
        ],
        "skipped": [
            {"system": name, "pattern": case.pattern, "density": case.density, "reason": reason}
            for case in request.cases
            for name in request.systems
            if (reason := request.obstacle(name, case)) is not None
        ],
    }


def _row(
    request: SparseRequest,
    case: Case,
    name: str,
    rounds: Sequence[Sample],
    systems: Mapping[str, Sequence[Sample]],
) -> dict[str, Any]:
    own = median(sample.seconds for sample in rounds)
    dense = [median(s.seconds for s in systems[d]) for d in DENSE if d in systems]
    row: dict[str, Any] = {
        "system": name,
        "ranks": request.ranks,
        "mbit": request.mbit,
        "pattern": case.pattern,
        "density": case.density,
        "median_s": own,
        "ratio": min(dense) / own if dense else None,
        "rounds_s": [sample.seconds for sample in rounds],
    }
    last = rounds[-1].statistics
    if last is not None:
        phases = [s.statistics.phases_s for s in rounds if s.statistics is not None]
        row |= {
            "executor": last.executor,
            "union": last.union,
            "bytes_up": last.bytes_up,
            "bytes_down": last.bytes_down,
            "predicted_s": last.predicted_s,
            "phases_s": {key: median(p.get(key, 0.0) for p in phases) for key in phases[-1]},
        }
        row["model_s"] = _model(request, case, row)
        if row["model_s"] is not None and dense:
            row["model"] = min(dense) / row["model_s"]
    return row


def _model(request: SparseRequest, case: Case, row: Mapping[str, Any]) -> float | None:
    """Return the seconds that theory allows: bytes over the link's rate, and measured kernels."""
    if request.mbit is None:
        return None
    masks = _masks(request, case)
    formulas = traffic(masks, request.block * 4)
    if row["executor"] not in formulas:
        return None
    moved = formulas[row["executor"]]
    kernels = sum(row["phases_s"].get(phase, 0.0) for phase in KERNEL_PHASES)
    return max(moved.up, moved.down) / (request.mbit * 1e6 / 8) + kernels


def _masks(request: SparseRequest, case: Case) -> Masks:
    import numpy as np

    blocks = request.numel // request.block
    table = np.zeros((request.ranks, blocks), dtype=bool)
    for rank in range(request.ranks):
        table[rank, active_blocks(case, blocks, rank)] = True
    return Masks.of(table)
