# SPDX-License-Identifier: Apache-2.0
"""Starting ranks that are unlike devices, one group after the other."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from wavemare.bench.throttle import open_throttle
from wavemare.bench.whale.clusters import Place, measure_choice
from wavemare.bench.whale.request import BASELINE, CHOICE, WhaleRequest

__all__ = ["measure"]


def measure(request: WhaleRequest) -> dict[str, Any]:
    """Run all groups of ranks to their end and return what they measured.

    Args:
        request: What to measure.

    Raises:
        LaunchError: There is no MPI here to start ranks, no laboratory for hosts, or a rank failed.
    """
    rows: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    cores = len(os.sched_getaffinity(0))
    with open_throttle() as throttle:
        for job in request.jobs(cores):
            found = Place(throttle).run(job)
            machine = found["machine"]
            rows += found["rows"]
        if CHOICE in request.parts:
            found = measure_choice(request, throttle, cores)
            machine = found["machine"]
            rows += found["rows"]
        way = throttle.way
    return {
        "machine": machine,
        "baseline": BASELINE,
        "throttle": way,
        "request": asdict(request),
        "rows": rows,
    }
