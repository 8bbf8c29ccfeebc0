# SPDX-License-Identifier: Apache-2.0
"""What each ``wavemare bench`` may be asked: options refused by their name, and JSON for ranks."""

import pytest

from wavemare.bench.options import parse_names, parse_numbers
from wavemare.bench.request import PipelineRequest
from wavemare.bench.sparse.request import PATTERNS, Case, SparseRequest
from wavemare.bench.sparse.request import SYSTEMS as SPARSE_SYSTEMS
from wavemare.bench.systems import SYSTEMS
from wavemare.bench.training.request import BASELINE, BOUND, QUALITY_SYSTEMS, TrainingRequest
from wavemare.bench.wave.request import WaveRequest
from wavemare.bench.whale.request import WhaleJob, WhaleRequest, device_shares
from wavemare.cli import app
from wavemare.errors import ConfigError

REFUSED = {
    PipelineRequest: [
        ({"stages": 1}, "--stages", "two"),
        ({"micro_batches": (1, 0)}, "--micro-batches", "1,2,4,8"),
        ({"systems": ()}, "--systems", "wavemare-pipemare"),
        ({"systems": ("deepspeed-1f1",)}, "--systems", "deepspeed-1f1b"),
        ({"steps_per_round": 0}, "--steps-per-round", "1"),
        ({"hidden": 10, "heads": 4}, "--hidden", "4 heads"),
        ({"stages": 8}, "--layers", "need 16 blocks"),
        ({"forward_ms": 1.0}, "--backward-ms", "both"),
        ({"forward_ms": 0.0, "backward_ms": 1.0}, "--forward-ms", "milliseconds"),
        ({"forward_ms": 1.0, "backward_ms": float("nan")}, "--backward-ms", "milliseconds"),
        ({"systems": ("torch-1f1b",), "micro_batches": (1,)}, "--micro-batches", "at least 2"),
        (
            {"systems": ("torch-zbv",), "forward_ms": 1.0, "backward_ms": 1.0},
            "--micro-batches",
            "splits the backward",
        ),
    ],
    SparseRequest: [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"mbit": 0.0}, "--mbit", "more than 0"),
        ({"mebibytes": -1.0}, "--mib", "more than 0"),
        ({"block": 0}, "--block", "1 or more"),
        ({"densities": (0.1, 1.5)}, "--densities", "0 to 1"),
        ({"patterns": ("zipff",)}, "--patterns", "'zipf'"),
        ({"systems": ("wavemare-pushpul",)}, "--systems", "wavemare-pushpull"),
    ],
    TrainingRequest: [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"mbit": 0.0}, "--mbit", "more than 0"),
        ({"steps_per_round": 0}, "--steps-per-round", "more than 0"),
        ({"vocabulary": 100}, "--vocabulary", "1000 or more"),
        ({"hidden": 30}, "--hidden", "multiple of --heads"),
        ({"sequence": 4}, "--sequence", "8 or more"),
        ({"ratio": 0.0}, "--ratio", "more than 0"),
        ({"ratio": 1.5}, "--ratio", "1 or less"),
        ({"learning_rate": float("nan")}, "--learning-rate", "more than 0"),
        ({"systems": ("wavemare-topc",)}, "--systems", "wavemare-topk"),
        ({"quality_steps": 0, "systems": QUALITY_SYSTEMS}, "--quality-steps", "more than 0"),
        ({"quality_steps": 5, "systems": ("torch-ddp",)}, "--systems", BASELINE),
        ({"quality_steps": 5, "systems": (BASELINE, BOUND)}, "--systems", "Leave it out"),
    ],
    WaveRequest: [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"exposed": ()}, "--exposed", "0 to 80"),
        ({"exposed": (10, 81)}, "--exposed", "0 to 80"),
        ({"micro_batches": 1}, "--micro-batches", "2 or more"),
        ({"patience": -1}, "--patience", "0 or more"),
        ({"sequence": 1}, "--sequence", "2 or more"),
        ({"batch": 3}, "--batch", "even"),
        ({"heads": 3, "hidden": 6}, "--heads", "multiple of --ranks"),
        ({"hidden": 30}, "--hidden", "multiple of --heads"),
    ],
    WhaleRequest: [
        ({"parts": ()}, "--parts", "shares"),
        ({"parts": ("share",)}, "--parts", "'shares'"),
        ({"schedules": ("gpipe",)}, "--schedules", "gpipe"),
        ({"clusters": ("unlik",)}, "--clusters", "'unlike'"),
        ({"mbit": 0.0}, "--mbit", "more than 0"),
        ({"ranks": ()}, "--ranks", "2 or more"),
        ({"ranks": (2, 3)}, "--ranks", "even numbers"),
        ({"ranks": (4,), "layers": 3}, "--layers", "4 or more"),
        ({"sequence": 1}, "--sequence", "2 or more"),
        ({"factor": 0.5}, "--factor", "1 or more"),
        ({"load": 1.5}, "--load", "up to 1"),
        ({"hidden": 130}, "--hidden", "multiple of --heads"),
    ],
}


@pytest.mark.parametrize(
    ("request_type", "values", "option", "named"),
    [(kind, *case) for kind, cases in REFUSED.items() for case in cases],
)
def test_a_bad_value_is_refused_by_its_option(request_type, values, option, named):
    with pytest.raises(ConfigError) as caught:
        request_type(**values).check()
    assert caught.value.key == option
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "request_",
    [
        PipelineRequest(),
        PipelineRequest(stages=4, micro_batches=(3,), forward_ms=1.5, backward_ms=2.0),
        PipelineRequest(stages=8, systems=("deepspeed-1f1b", "torch-1f1b", "wavemare-pipemare")),
        PipelineRequest(stages=16, forward_ms=1.0, backward_ms=2.0, micro_batches=(32,)),
        SparseRequest(),
        SparseRequest(ranks=2, mbit=200.0, densities=(0.5,), systems=("wavemare-auto-gloo",)),
        TrainingRequest(ranks=4, mbit=200.0, systems=(BASELINE,), data="a.tsv"),
        TrainingRequest(quality_steps=10, systems=QUALITY_SYSTEMS, compressor_warmup=3),
        WaveRequest(),
        WaveRequest(exposed=(0,), trace="/a.json", links="/folder"),
        WhaleRequest(),
        WhaleRequest(parts=("cuts",), ranks=(3,)),
    ],
    ids=str,
)
def test_a_good_request_reaches_the_ranks_as_json(request_):
    request_.check()
    assert type(request_).from_json(request_.to_json()) == request_


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["pipeline", "--systems", "deepspeed"], "--systems"),
        (["pipeline", "--synthetic", "--backward-ms", "-1"], "--backward-ms"),
        (["pipeline", "--json", "/no/such/folder/result.json"], "--json"),
        (["pipeline", "--trace", "/dev/null/folder"], "--trace"),
        (["sparse", "--patterns", "zipff"], "--patterns"),
        (["training", "--hidden", "30"], "--hidden"),
        (["wave", "--batch", "3"], "--batch"),
        (["quality", "gpt", "--systems", "flash"], "--systems"),
        (["whale", "--ranks", "3"], "--ranks"),
    ],
)
def test_the_command_line_refuses_before_it_starts_ranks(words, option):
    with pytest.raises(ConfigError) as caught:
        app(["bench", *words], standalone_mode=False)
    assert caught.value.key == option


def test_no_folder_is_left_by_a_refused_request(tmp_path):
    folder = tmp_path / "trace"
    with pytest.raises(ConfigError):
        app(["bench", "pipeline", "--stages", "0", "--trace", str(folder)], standalone_mode=False)
    assert not folder.exists()


def test_numbers_and_names_between_commas():
    assert parse_numbers("--micro-batches", "1, 2,4,2") == (1, 2, 4)
    assert parse_names(" a,b ,,a") == ("a", "b")
    for text in ("1,x", "-1", "1.5", "1 2"):
        with pytest.raises(ConfigError, match="--micro-batches"):
            parse_numbers("--micro-batches", text)


@pytest.mark.parametrize(("micro_batches", "steps"), [(1, 8), (2, 4), (3, 3), (4, 2), (8, 2)])
def test_rounds_of_few_micro_batches_have_more_steps(micro_batches, steps):
    assert PipelineRequest().steps(micro_batches) == steps
    assert PipelineRequest(steps_per_round=5).steps(micro_batches) == 5


@pytest.mark.parametrize("stages", [2, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_the_pipeline_is_full_before_and_behind_the_timed_steps(stages, micro_batches):
    request = PipelineRequest(stages=stages)
    for system in SYSTEMS.values():
        lead = request.lead(system, micro_batches) * micro_batches
        tail = request.tail(system, micro_batches) * micro_batches
        if system.steady:
            # The first stage is P - 1 forward passes ahead of the last.
            assert lead >= stages + micro_batches
            assert tail >= stages - 1
        else:
            assert (lead, tail) == (micro_batches, 0)


def test_all_sparse_patterns_are_one_where_nothing_is_zero():
    cases = SparseRequest(densities=(1.0, 0.1)).cases
    assert cases == [Case("random", 1.0), *(Case(pattern, 0.1) for pattern in PATTERNS)]


def test_systems_that_multiply_the_bytes_are_left_out_of_dense_cases():
    request = SparseRequest()
    left_out = {name for name in SPARSE_SYSTEMS if request.obstacle(name, Case("random", 1.0))}
    assert {"torch-sparse", "deepspeed-sparse", "wavemare-agsparse-gloo"} <= left_out
    assert not any(request.obstacle(name, Case("random", 0.4)) for name in SPARSE_SYSTEMS)


def test_links_are_shaped_for_exposed_communication_alone():
    assert WaveRequest().shaped
    assert not WaveRequest(exposed=(0,)).shaped


def test_whale_devices_share_the_cores_by_their_speeds():
    assert device_shares((2, 1), 1.35) == pytest.approx((0.9, 0.45))
    assert device_shares((2, 2, 1, 1), 1.35) == pytest.approx((0.45, 0.45, 0.225, 0.225))
    # However many cores there are, a rank of one thread has some rest.
    assert device_shares((2, 1), 64) == pytest.approx((0.9, 0.45))


def test_half_of_the_whale_ranks_share_less_and_either_end_of_a_pipeline_is_slow():
    jobs = list(WhaleRequest(ranks=(2,), schedules=("1f1b", "pipemare"), factor=3.0).jobs(2))
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
    assert WhaleJob.from_json(jobs[0].to_json()) == jobs[0]


def test_the_planner_is_tried_on_four_ranks():
    request = WhaleRequest(clusters=("unlike", "hosts"))
    (first, unlike), (second, hosts) = request.cluster_jobs(2)
    assert (first, second) == ("unlike", "hosts")
    assert unlike.devices == pytest.approx((0.45, 0.45, 0.225, 0.225))
    assert hosts.devices == pytest.approx((0.3375,) * 4)
    assert not [job for job in request.jobs(2) if job.part == "choice"]
