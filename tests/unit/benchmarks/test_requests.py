# SPDX-License-Identifier: Apache-2.0
"""Options of the benchmarks: refused by name, the same in the request, and JSON for ranks."""

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.gpu.request import GpuJob, GpuRequest
from benchmarks.layouts.request import LayoutsRequest
from benchmarks.local_steps.elastic_request import ElasticRequest
from benchmarks.local_steps.request import LocalStepsRequest
from benchmarks.losses.request import LossesRequest
from benchmarks.pipeline.request import SYSTEMS, PipelineRequest
from benchmarks.planner.request import PlannerRequest
from benchmarks.sparse.request import STEP_SYSTEMS, Case, SparseRequest
from benchmarks.sparse.request import SYSTEMS as SPARSE_SYSTEMS
from benchmarks.wave.request import WaveRequest
from wavemare.errors import ConfigError

STAGES = {"ranks": 4, "ranks_per_host": 2, "stages": 2}
REFUSED = {
    PipelineRequest: [
        ({"stages": 1}, "--stages", "2 or more"),
        ({"micro_batches": (1, 0)}, "--micro-batches", "more than 0"),
        ({"systems": ("deepspeed-1f1",)}, "--systems", "deepspeed-1f1b"),
        ({"hidden": 10, "heads": 4}, "--hidden", "4 heads"),
        ({"stages": 8}, "--layers", "need 16 blocks"),
        ({"forward_ms": 1.0}, "--forward-ms", "Add --synthetic"),
        ({"synthetic": True, "backward_ms": float("inf")}, "--backward-ms", "finite"),
        ({"systems": ("torch-1f1b",), "micro_batches": (1,)}, "--micro-batches", "at least 2"),
        ({"synthetic": True, "weight_ms": 21.0}, "--weight-ms", "smaller"),
        ({"muon_ms": 1.0}, "--muon-ms", "Add --synthetic"),
    ],
    LossesRequest: [
        ({"systems": ("torch-zbv",)}, "--systems", "deepspeed-1f1b"),
        ({"systems": ("wavemare-auto-v",), "layers": 3}, "--layers", "need 4 blocks"),
        ({"warmups": 1}, "--warmups", "at most 0"),
        ({"muon_lr": 0.0}, "--muon-lr", "more than 0"),
    ],
    SparseRequest: [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"densities": (0.1, 1.5)}, "--densities", "at most 1"),
        ({"patterns": ("zipff",)}, "--patterns", "'zipf'"),
        ({"systems": ("wavemare-pushpul",)}, "--systems", "wavemare-pushpull"),
        ({"systems": ("omnireduce",)}, "--aggregators", "needs some"),
        ({"aggregators": 1}, "--aggregators", "neither"),
        ({"ranks": 4, "ranks_per_host": 3}, "--ranks-per-host", "Give a divisor"),
        ({"step": True, "systems": ("gloo-dense",)}, "--systems", "no such system"),
        ({"step": True, "vocabulary": 100}, "--vocabulary", "1000 or more"),
    ],
    WaveRequest: [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"exposed": (10, 81)}, "--exposed", "at most 80"),
        ({"micro_batches": 1}, "--micro-batches", "2 or more"),
        ({"batch": 3}, "--batch", "even"),
        ({"parallel": "expert"}, "--parallel", "'experts'"),
        ({"parallel": "experts", "llama": True}, "--llama", "no experts"),
    ],
    LocalStepsRequest: [
        ({"ranks_per_host": 2}, "--ranks-per-host", "two or more hosts"),
        ({"ranks": 3, "ranks_per_host": 2}, "--ranks-per-host", "Give a divisor"),
        ({"every": 6}, "--every", "4"),
        ({"systems": ("ddp",), "quality": 8}, "--quality", "deepspeed-zero1"),
        ({"stages": 2}, "--stages", "--ranks-per-host"),
        ({**STAGES, "systems": ("torchft-diloco",)}, "--systems", "leave out --stages"),
        ({"systems": ("deepspeed-1f1b",)}, "--systems", "add --stages"),
        ({"micro_batches": 4}, "--micro-batches", "Add --stages"),
        ({**STAGES, "layers": 1}, "--layers", "2 blocks"),
        ({**STAGES, "quality": 8}, "--quality", "--stages"),
    ],
    ElasticRequest: [
        ({"replicas": 1}, "--replicas", "2 or more"),
        ({"steps": 100}, "--steps", "--every 32"),
        ({"calm_steps": 8}, "--calm-steps", "--every 32"),
        ({"systems": ("elastc",)}, "--systems", "'elastic'"),
    ],
    GpuRequest: [
        ({"parts": ("kernel",)}, "--parts", "'kernels'"),
        ({"parts": ()}, "--parts", "kernels"),
        ({"systems": ("torch-zb",)}, "--systems", "torch-zbv"),
        ({"limit_s": 0.0}, "--limit-s", "more than 0"),
    ],
    LayoutsRequest: [
        ({"clusters": ("2:2",)}, "--clusters", "2:1"),
        ({"block_ms": 0.0}, "--block-ms", "more than 0"),
    ],
    PlannerRequest: [
        ({"parts": ("share",)}, "--parts", "'shares'"),
        ({"schedules": ("gpipe",)}, "--schedules", "gpipe"),
        ({"clusters": ("unlik",)}, "--clusters", "'unlike'"),
        ({"ranks": (2, 3)}, "--ranks", "even numbers"),
        ({"ranks": (4,), "layers": 3}, "--layers", "4 or more"),
        ({"factor": 0.5}, "--factor", "1 or more"),
        ({"load": 1.5}, "--load", "at most 1"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "values", "option", "named"),
    [(kind, *case) for kind, cases in REFUSED.items() for case in cases],
)
def test_a_bad_value_is_refused_by_its_option(kind, values, option, named):
    with pytest.raises(ConfigError) as caught:
        kind.of(**values)
    assert caught.value.key == option
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "request_",
    [
        PipelineRequest.of(stages=4, micro_batches=(3,), synthetic=True, forward_ms=1.5),
        LossesRequest.of(rounds=2, steps_per_round=3),
        SparseRequest.of(ranks=2, mbit=200.0, densities=(0.5,), systems=("wavemare-auto-gloo",)),
        WaveRequest.of(exposed=(0,)),
        LocalStepsRequest.of(ranks=4, ranks_per_host=2, dense_steps=2),
        LocalStepsRequest.of(**STAGES, micro_batches=3, systems=("deepspeed-1f1b",)),
        ElasticRequest.of(systems=("fixed", "restarts-killed"), kill_every=30.0),
        PlannerRequest.of(parts=("cuts",), ranks=(3,)),
        next(PlannerRequest.of().jobs(cores=2)),
        GpuRequest.of(parts=("step", "waves"), tiny=True),
        GpuJob(parts=("collectives",), ranks=2, backend="nccl", rounds=3),
    ],
    ids=str,
)
def test_a_request_reaches_the_ranks_as_json(request_):
    assert type(request_).model_validate_json(request_.model_dump_json()) == request_


def test_options_become_the_request(monkeypatch):
    requests = []
    monkeypatch.setattr(SparseRequest, "run", lambda self: requests.append(self) or 1 / 0)
    words = "sparse --ranks 2 --mib 4 --densities 0.1,0.01,0.1 --patterns zipf --rounds 3"
    with pytest.raises(ZeroDivisionError):
        app([*words.split(), "--step"], standalone_mode=False)
    expected = {"ranks": 2, "mib": 4.0, "densities": (0.1, 0.01), "patterns": ("zipf",)}
    assert requests == [SparseRequest.of(**expected, rounds=3, step=True)]
    assert requests[0].chosen == STEP_SYSTEMS


@pytest.mark.parametrize(
    "name", ["pipeline", "losses", "sparse", "wave", "planner", "local-steps", "gpu"]
)
def test_each_option_is_explained(name):
    found = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
    for word in ("--rounds", "--warmups", "--json", "--plot", "For example: python -m benchmarks"):
        assert word in found


@pytest.mark.parametrize(("micro_batches", "steps"), [(1, 8), (2, 4), (3, 3), (4, 2), (8, 2)])
def test_rounds_of_few_micro_batches_have_more_steps(micro_batches, steps):
    assert PipelineRequest().steps(micro_batches) == steps
    assert PipelineRequest(steps_per_round=5).steps(micro_batches) == 5


@pytest.mark.parametrize("stages", [2, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_the_pipeline_is_full_before_and_behind_the_timed_steps(stages, micro_batches):
    request = PipelineRequest(stages=stages)
    for name, system in SYSTEMS.items():
        # The first stage is P - 1 forward passes ahead of the last.
        fill = request.fill(name, micro_batches) * micro_batches
        assert fill >= stages - 1 if system.steady else fill == 0


def test_systems_that_multiply_the_bytes_are_left_out_of_dense_cases():
    request = SparseRequest()
    left_out = {name for name in SPARSE_SYSTEMS if request.obstacle(name, Case("random", 1.0))}
    assert {"torch-sparse", "deepspeed-sparse", "agsparse-gloo"} <= left_out
    assert not any(request.obstacle(name, Case("random", 0.4)) for name in SPARSE_SYSTEMS)


def test_half_of_the_ranks_share_less_and_either_end_of_a_pipeline_is_slow():
    jobs = list(PlannerRequest(ranks=(2,), factor=3.0).jobs(2))
    assert [(job.part, job.schedule, job.ranks) for job in jobs] == [
        ("shares", "1f1b", 2),
        ("cuts", "1f1b", 2),
        ("cuts", "pipemare", 2),
        ("cuts", "1f1b", 2),
        ("cuts", "pipemare", 2),
    ]
    speeds = [job.devices[0] / job.devices[1] for job in jobs]
    assert speeds == pytest.approx([3, 1 / 3, 1 / 3, 3, 3])
    assert all(sum(job.devices) <= 0.675 * 2 for job in jobs)


def test_the_planner_is_tried_on_four_ranks():
    request = PlannerRequest(parts=("choice",), clusters=("unlike", "hosts"))
    (first, unlike), (second, hosts) = request.cluster_jobs(2)
    assert (first, second) == ("unlike", "hosts")
    assert unlike.devices == pytest.approx((0.45, 0.45, 0.225, 0.225))
    assert hosts.devices == pytest.approx((0.3375,) * 4)
    assert list(request.jobs(2)) == []
