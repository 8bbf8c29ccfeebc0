# SPDX-License-Identifier: Apache-2.0
"""Starting ranks that measure waves: over links that they may have changed, where any are asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wavemare.bench import launch
from wavemare.bench.network import Laboratory
from wavemare.bench.wave.links import links_on_demand
from wavemare.bench.wave.request import WaveRequest

__all__ = ["measure"]

_WORKER = "wavemare.bench.wave.worker"


def measure(request: WaveRequest) -> dict[str, Any]:
    """Run the ranks to their end and return what they measured.

    Args:
        request: What to measure. Without a share of exposed communication the ranks share this
            machine's memory.

    Raises:
        LaunchError: There is no laboratory, or no MPI if none is needed, or a rank failed.
    """
    if not request.shaped:
        return launch.measure(request, _WORKER)
    with Laboratory(request.ranks) as laboratory:
        request = replace(request, links=str(laboratory.folder))
        with links_on_demand(laboratory, laboratory.folder):
            return launch.measure_on_hosts(laboratory, request, _WORKER)
