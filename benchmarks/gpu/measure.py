# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks gpu``: measures its parts, one after the other."""

from __future__ import annotations

import os
import pkgutil
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.request import GpuJob
from benchmarks.gpu.run import skip
from benchmarks.gpu.timing import Scene
from benchmarks.run import describe_error
from wavemare.observe import Screen


def measure(job: GpuJob) -> dict[str, Any]:
    """Measure the parts of a job.

    A part of one rank that fails is left out with its error. Of several ranks, the one that fails
    ends: the others would wait for it.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # Of gloo's ranks there may be more than GPUs.
        number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    scene = Scene(job, device, Screen(rank=dist.get_rank()).note)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for name in job.parts:
        found: list[dict[str, Any]] = []
        try:
            for row in pkgutil.resolve_name(f"benchmarks.gpu.{name}:measure")(scene):
                found.append(row)
        except Exception as error:
            if job.ranks > 1:
                raise
            found.append(skip(name, describe_error(error)))
        rows += [row for row in found if "reason" not in row]
        skipped += [row for row in found if "reason" in row]
    return {"rows": rows, "skipped": skipped}
