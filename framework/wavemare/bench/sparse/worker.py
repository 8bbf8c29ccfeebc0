# SPDX-License-Identifier: Apache-2.0
"""One rank of ``wavemare bench sparse``: started by ``mpirun``, told by a file what to measure."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wavemare.bench.answer import answer
from wavemare.bench.rounds import rotated
from wavemare.bench.sparse.gradients import make_gradient
from wavemare.bench.sparse.report import Measured, Sample, build_result
from wavemare.bench.sparse.request import Case, SparseRequest
from wavemare.bench.sparse.systems import Bench, build_system
from wavemare.comm.selection.cost import Constants
from wavemare.comm.transport import Transport, open_transport
from wavemare.errors import CommError
from wavemare.failure import run_main
from wavemare.observe import Screen

__all__ = ["main"]

_TIMEOUT_S = 120.0


def main() -> None:
    """Measure what the request asks for; rank 0 leaves the result."""
    answer(SparseRequest, measure)


def measure(request: SparseRequest) -> dict[str, Any]:
    """Build all systems, run all rounds of all cases and return the result of rank 0."""
    torch.set_num_threads(1)
    transport = open_transport(choice="mpi", timeout_s=_TIMEOUT_S)
    constants: dict[str, Constants] = {}
    # The first one to be built measures the constants for the others.
    names = sorted(request.systems, key=lambda name: "auto" not in name)
    systems = {name: build_system(name, transport, request.block, constants) for name in names}
    systems = {name: systems[name] for name in request.systems}
    measured: Measured = {}
    screen = Screen(rank=transport.rank)
    for case in request.cases:
        screen.note(f"{case.pattern}, density {case.density:g}")
        measured[case] = _measure_case(request, case, systems, transport)
    for system in systems.values():
        system.close()
    transport.barrier()
    transport.close()
    return build_result(request, measured, constants)


def _measure_case(
    request: SparseRequest, case: Case, systems: dict[str, Bench], transport: Transport
) -> dict[str, list[Sample]]:
    """Run all rounds of a case; the systems take turns in an order that rotates."""
    numel = request.numel // request.block * request.block
    gradient = make_gradient(case, numel, request.block, transport.rank)
    expected, magnitude = _expected(gradient)
    working = torch.empty_like(gradient)
    samples: dict[str, list[Sample]] = defaultdict(list)
    names = [name for name in systems if request.obstacle(name, case) is None]
    for turn in range(request.warmups + request.rounds):
        for name in rotated(names, turn):
            working.copy_(gradient)
            systems[name].prepare(case, working)
            sample = _timed(systems[name], transport)
            if turn == 0:
                _check(name, case, systems[name].result(sample.summed), expected, magnitude)
            if turn >= request.warmups:
                samples[name].append(sample._replace(summed=None))
    return samples


def _timed(system: Bench, transport: Transport) -> Sample:
    """Time one call: from a barrier to the end on the slowest rank."""
    transport.barrier()
    started = time.perf_counter()
    summed = system.sum()
    mine = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    table = torch.empty(transport.size, 1, dtype=torch.float64)
    transport.all_gather(mine, table)
    return Sample(float(table.max()), system.statistics, summed)


def _expected(gradient: Tensor) -> tuple[Tensor, Tensor]:
    expected, magnitude = gradient.clone(), gradient.abs()
    dist.all_reduce(expected)
    dist.all_reduce(magnitude)
    return expected, magnitude


def _check(name: str, case: Case, result: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Check a sum within rounding: |error| <= N 2^-23 sum of magnitudes."""
    bound = dist.get_world_size() * 2.0**-23 * magnitude
    if not bool(((result - expected).abs() <= bound).all()):
        worst = float((result - expected).abs().max())
        reason = f"its sum is off by up to {worst:g} ({case.key})"
        raise CommError("system", name, reason, "Report this: no measurement of it means anything")


if __name__ == "__main__":
    run_main(main)
