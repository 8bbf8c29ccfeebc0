# SPDX-License-Identifier: Apache-2.0
"""One rank of ``wavemare bench whale``: told by a file what to measure."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from wavemare.bench.answer import answer
from wavemare.bench.whale.choice import probe, try_plan
from wavemare.bench.whale.cuts import measure_cuts
from wavemare.bench.whale.places import take_place
from wavemare.bench.whale.request import CUTS, PROBE, SHARES, TRIAL, WhaleJob
from wavemare.bench.whale.shares import measure_shares
from wavemare.failure import run_main
from wavemare.observe import Screen

__all__ = ["main"]

_MEASURE = {SHARES: measure_shares, CUTS: measure_cuts, PROBE: probe, TRIAL: try_plan}


def main() -> None:
    """Measure what the job asks for; rank 0 leaves the result."""
    take_place()
    answer(WhaleJob, measure)


def measure(job: WhaleJob) -> dict[str, Any]:
    """Return what a job has measured."""
    torch.set_num_threads(1)
    return _MEASURE[job.part](job, Screen(rank=dist.get_rank()))


if __name__ == "__main__":
    run_main(main)
