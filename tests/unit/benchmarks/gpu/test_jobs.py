# SPDX-License-Identifier: Apache-2.0
"""Launches of ``benchmarks gpu``: which there are, what one that fails leaves, and ratios."""

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.request import PARTS, GpuRequest
from wavemare.errors import LaunchError


def row(part, system, seconds, *, case="", **more):
    return {"part": part, "case": case, "system": system, "median_s": seconds, **more}


def test_on_a_gpu_each_part_has_its_own_launch_and_on_cpus_those_of_one_rank_share_one():
    request = GpuRequest()
    on_gpu = list(request.jobs(on_gpu=True))
    assert [(*job.parts, job.ranks, job.backend) for job in on_gpu] == [
        (name, part.ranks, backend) for name, part in PARTS.items() for backend in part.backends
    ]
    first, *others = request.jobs(on_gpu=False)
    assert first.parts == tuple(name for name, part in PARTS.items() if part.ranks == 1)
    assert [(job.parts, job.ranks) for job in others] == [
        (("collectives",), 2),
        (("schedules",), 2),
    ]
    assert {job.backend for job in (first, *others)} == {"gloo"}
    # A part that is named alone is launched alone.
    assert [job.parts for job in GpuRequest(parts=("step",)).jobs(on_gpu=False)] == [("step",)]


@pytest.fixture
def launches(monkeypatch):
    """Have launches answer without ranks; a function says what."""

    def answer_by(function):
        def run_ranks(job, *, environment, timeout_s):
            return {"machine": {}, "skipped": [], "rows": function(job, timeout_s)}

        monkeypatch.setattr(run, "run_ranks", run_ranks)
        monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)

    return answer_by


def test_a_launch_that_fails_ends_no_other_one(launches):
    def answer(job, timeout_s):
        if "collectives" in job.parts:
            raise LaunchError("ranks", 2, "rank 1 failed: MemoryError", "Look above")
        return [row(name, "a", 1.0, host_s=1.0) for name in job.parts]

    launches(answer)
    result = run.run_jobs(GpuRequest())
    assert result["tiny"]
    assert result["device"] == "cpu"
    assert {each["part"] for each in result["rows"]} == PARTS.keys() - {"collectives"}
    assert [(each["part"], each["case"]) for each in result["skipped"]] == [
        ("collectives", "nccl"),  # there is no GPU
        ("collectives", "gloo"),
    ]
    assert result["skipped"][1]["reason"] == "rank 1 failed: MemoryError"


def test_no_launch_begins_when_the_time_is_over(launches):
    limits = []
    launches(lambda job, timeout_s: limits.append(timeout_s) or [])
    run.run_jobs(GpuRequest(parts=("collectives", "schedules"), limit_s=60.0))
    assert len(limits) == 2
    assert all(0 < limit <= 20 for limit in limits)
    result = run.run_jobs(GpuRequest(parts=("schedules",), limit_s=1.0))
    assert len(limits) == 2
    assert [each["part"] for each in result["skipped"]] == ["schedules"]


def test_ratios_are_to_the_first_baseline_that_is_there():
    rows = [
        row("collectives", "gloo-all-reduce", 2.0, case="a"),
        row("collectives", "nccl-all-reduce", 6.0, case="a"),
        row("collectives", "gloo-auto", 3.0, case="a"),
        row("collectives", "gloo-all-reduce", 2.0, case="b"),
        row("collectives", "gloo-auto", 1.0, case="b"),
        row("collectives", "gloo-auto", 1.0, case="c"),
        row("kernels", "copy", 2.0, bytes=100),
        row("kernels", "mask", 2.0, bytes=50),
        row("schedules", "torch-zbv", 1.0, host_s=4.0),
        row("schedules", "wavemare-zbv", 1.0, host_s=2.0),
    ]
    run.add_ratios(rows)
    assert [each["ratio"] for each in rows] == [3.0, 1.0, 2.0, 1.0, 2.0, None, 1.0, 0.5, 1.0, 2.0]
