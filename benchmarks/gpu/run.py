# SPDX-License-Identifier: Apache-2.0
"""The launches of ``benchmarks gpu``, one after the other, and their rows with ratios."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.request import GLOO, NCCL, PARTS, GpuJob, GpuRequest
from benchmarks.run import run_ranks
from wavemare.errors import LaunchError
from wavemare.observe.run import describe_machine

_LARGEST_SHARE = 1 / 3
_LEAST_S = 10.0


def run_jobs(request: GpuRequest) -> dict[str, Any]:
    """Run all launches to their end and return their rows; those that fail have a reason.

    Args:
        request: What to measure.
    """
    on_gpu = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    launches: list[dict[str, Any]] = []
    if not on_gpu:
        print("There is no GPU here: all parts run on the CPU, at tiny sizes.", flush=True)
        request = request.model_copy(update={"tiny": True})
        skipped += [
            skip(name, "there is no GPU here", case=NCCL)
            for name in request.parts
            if NCCL in PARTS[name].backends and GLOO in PARTS[name].backends
        ]
    machine: dict[str, Any] = {}
    began = time.monotonic()
    for job in request.jobs(on_gpu=on_gpu):
        print(f"{', '.join(job.parts)} over {job.backend}", flush=True)
        left = request.limit_s - (time.monotonic() - began)
        limit = min(left, max(_LEAST_S, request.limit_s * _LARGEST_SHARE))
        started = time.monotonic()
        try:
            answer = _run(job, limit)
        except LaunchError as error:
            skipped += [skip(name, error.reason, case=job.backend) for name in job.parts]
        else:
            rows += answer["rows"]
            skipped += answer["skipped"]
            machine = answer["machine"]
        spent = time.monotonic() - started
        launches.append({"parts": job.parts, "backend": job.backend, "seconds": spent})
    add_ratios(rows)
    return {
        "machine": machine or describe_machine(),
        "baseline": "each part's baseline",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "tiny": request.tiny,
        "launches": launches,
        "rows": rows,
        "skipped": skipped,
    }


def _run(job: GpuJob, limit_s: float) -> dict[str, Any]:
    """Start the ranks of a job.

    Raises:
        LaunchError: They failed, or took too long.
    """
    if limit_s < _LEAST_S:
        reason = "the time for all parts is over"
        raise LaunchError("--limit-s", limit_s, reason, "Give more, or fewer parts")
    # DeepSpeed takes the backend of the process group from it.
    environment = {"DS_ACCELERATOR": "cpu" if job.backend == GLOO else "cuda"}
    return run_ranks(job, environment=environment, timeout_s=limit_s)


def skip(part: str, reason: str, *, case: str = "", system: str = "") -> dict[str, Any]:
    """Return the entry of what is left out."""
    return {"part": part, "case": case, "system": system, "reason": reason}


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row how many times as fast as the baseline of its case it is.

    Where rows have ``bytes``, the seconds of a byte are compared. Without a baseline the ratio is
    None.
    """
    named = {(row["part"], row["case"], row["system"]): row for row in rows}
    for row in rows:
        part = PARTS[row["part"]]
        keys = ((row["part"], row["case"], name) for name in part.baselines)
        baseline = next((named[key] for key in keys if key in named), None)
        row["ratio"] = None
        if baseline is not None:
            own, other = (each[part.figure] / each.get("bytes", 1) for each in (row, baseline))
            row["ratio"] = other / own
