# SPDX-License-Identifier: Apache-2.0
"""A replica with local steps may be a pipeline, split, or divide experts: beside a slow twin."""

import json
from functools import partial

import numpy as np
import pytest

KEY = "wavemare.local_steps"
STREAM = {"mode": "diloco", "every": 4, "fragments": 2, "overlap": 1, "replica": 2}
WARM = {**STREAM, "warmup_steps": 4}
STAGES = {"pipeline": {"stages": 2}}
ZBV = {"pipeline": {"stages": 2, "schedule": "zbv"}}
SPLIT = {"tensor_parallel": {"size": 2}}
EXPERTS = {"expert_parallel": {"size": 2}}
BOTH = {**SPLIT, **EXPERTS}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}}
TWINS = {
    "tied stages": {"local": STREAM, "section": STAGES},
    "stages, ZeRO 1": {
        "local": {**STREAM, "overlap": 0},
        "section": ZBV,
        "zero": 1,
        "model": "long",
    },
    "split": {"local": STREAM, "section": SPLIT},
    "experts": {"local": STREAM, "section": EXPERTS, "model": "moe"},
    "experts, ZeRO 1": {"local": STREAM, "section": EXPERTS, "model": "moe", "zero": 1},
}
RESUMED = {
    "resume stages": {"local": {**STREAM, "bits": 4}, "section": STAGES, "model": "untied"},
    "resume ZeRO 1": {"local": STREAM, "section": ZBV, "zero": 1, "model": "long"},
    "resume split": {"local": STREAM, "section": SPLIT},
    "resume experts": {"local": STREAM, "section": EXPERTS, "model": "moe", "zero": 2},
}
SAVED = {
    "save stages": {"local": STREAM, "section": STAGES},
    "save split": {"local": STREAM, "section": SPLIT},
    "save experts": {"local": STREAM, "section": EXPERTS, "model": "moe"},
}
RANK = {**STREAM, "replica": "rank"}
REFUSED = {
    "rank": ({"local": RANK, "section": STAGES}, f"{KEY}.replica = 'rank'"),
    "many experts": ({"local": STREAM, "section": {**STAGES, **EXPERTS}, "model": "moe"}, KEY),
    "tied bits": ({"local": {**STREAM, "bits": 4}, "section": STAGES}, f"{KEY}.bits = 4"),
    "split bits": ({"local": {**STREAM, "bits": 4}, "section": SPLIT}, f"{KEY}.bits = 4"),
}
LONG = {"steps": 6, "model": "untied", "section": STAGES}
CASES = {
    4: {
        **{name: ["twin", given] for name, given in TWINS.items()},
        **{n: ["resume", {"name": n, "before": 6, **given}] for n, given in RESUMED.items()},
        **{name: ["saved", given] for name, given in SAVED.items()},
        **{name: ["refused", given] for name, (given, _) in REFUSED.items()},
        "own pipeline": ["own_pipeline", {"local": STREAM}],
        "plain": ["train", {"local": STREAM, **LONG}],
        "bf16": ["train", {"local": STREAM, **LONG, "bf16": {"enabled": True}}],
        "4 bits": ["train", {"local": {**STREAM, "bits": 4}, **LONG}],
        "warm-up": ["train", {"local": WARM, **LONG, **SGD, "steps": 4, "clip": 0.5}],
        "synchronous": ["train", {"local": None, **LONG, **SGD, "steps": 4, "clip": 0.5}],
        "frozen stage": ["train", {"local": STREAM, **LONG, "frozen": ["wte", "wpe", "h.0"]}],
    },
    8: {
        "2 x 2 x 2": ["twin", {"local": {**STREAM, "replica": 4}, "section": STAGES, "zero": 1}],
        "split stages": [
            "twin",
            {"local": {**STREAM, "replica": 4}, "section": {**STAGES, **SPLIT}},
        ],
        "experts of stages": [
            "twin",
            {"local": {**STREAM, "replica": 4}, "section": {**STAGES, **EXPERTS}, "model": "moe"},
        ],
        "split experts": [
            "twin",
            {"local": {**STREAM, "replica": 4}, "section": BOTH, "model": "moe"},
        ],
        "resume split stages": [
            "resume",
            {
                "local": {**STREAM, "replica": 4},
                "section": {**STAGES, **SPLIT},
                "zero": 1,
                "name": "split stages",
                "before": 6,
            },
        ],
    },
}


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "any_replica.py", CASES, timeout=600)


def near_the_twin(results):
    for result in results:
        assert max(result["off"]) < 2e-6, result
        assert result["common"] < 2e-6, result
        told = {"drift", "outer_wait_seconds", "outer_bytes", "replica_loss"}
        assert told <= result["metrics"].keys()
    assert len({result["metrics"]["replica_loss"] for result in results}) == 1


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", TWINS)
def test_replicas_of_parts_train_as_a_slow_twin_of_the_whole(found, case):
    near_the_twin(found(case))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", RESUMED)
def test_parts_resume_with_a_message_in_flight_to_the_same_bits(found, case):
    for result in found(case):
        assert result["resumed"] == result["whole"]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", SAVED)
def test_what_is_saved_are_the_common_weights_of_all_parts(found, case):
    assert found(case) == [0.0] * 4


@pytest.mark.world_size(4)
def test_a_warm_up_of_pipelines_is_synchronous_training(found):
    ours, stock = found("warm-up"), found("synchronous")
    for name, weights in ours[0]["whole"].items():
        assert np.allclose(weights, stock[0]["whole"][name], atol=1e-6), name
    for one, other in zip(ours, stock, strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
        assert one["evaluated"] == pytest.approx(other["evaluated"], rel=1e-5)
        assert one["batch"] == other["batch"] == 8
    assert [one["data"] for one in ours] == [[0, 2, 2], [0, 2, 2], [1, 2, 2], [1, 2, 2]]
    assert ours[0]["losses"] == ours[1]["losses"] != ours[2]["losses"] == ours[3]["losses"]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("case", "off"), [("bf16", 0.02), ("4 bits", 0.01)])
def test_half_weights_and_few_bits_of_stages_train_alike(found, case, off):
    results, plain = found(case), found("plain")[0]["whole"]
    for name, weights in results[0]["whole"].items():
        assert np.abs(np.array(weights) - plain[name]).mean() < off, name
    for stage in (0, 1):
        assert results[stage]["digest"] == results[2 + stage]["digest"]


@pytest.mark.world_size(4)
def test_a_stage_without_trained_weights_exchanges_none(found):
    results, plain = found("frozen stage"), found("plain")
    assert results[0]["digest"] == results[2]["digest"] != plain[0]["digest"]
    assert results[1]["digest"] == results[3]["digest"]


@pytest.mark.world_size(4)
def test_what_replicas_do_not_hold_is_refused_on_all_ranks(found):
    for case, (_, begins) in REFUSED.items():
        said = set(found(case))
        assert len(said) == 1
        assert f"ConfigError: {begins}" in said.pop()
    for said in found("own pipeline"):
        assert f"{KEY}.elastic" in said


@pytest.mark.nightly
@pytest.mark.world_size(8)
@pytest.mark.parametrize("case", [case for case, (kind, _) in CASES[8].items() if kind == "twin"])
def test_replicas_of_four_ranks_train_as_a_slow_twin_of_the_whole(found, case):
    near_the_twin(found(case))


@pytest.mark.nightly
@pytest.mark.world_size(8)
def test_split_stages_resume_to_the_same_bits(found):
    for result in found("resume split stages"):
        assert result["resumed"] == result["whole"]


@pytest.mark.world_size(4)
def test_another_number_of_pipelines_goes_on_from_the_common_weights(launch, tmp_path):
    folder = str(tmp_path / "saved")
    cases = json.dumps({"run": ["carried", {"local": STREAM, "section": STAGES, "folder": folder}]})
    four = launch("any_replica.py", cases, ranks=4, folder=tmp_path).check()
    saved = [four.result(rank)["run"] for rank in range(4)]
    six = launch("any_replica.py", cases, ranks=6, folder=tmp_path).check()
    found = [six.result(rank)["run"] for rank in range(6)]
    assert {one["said"] for one in found} == {"accepted"}
    assert {one["steps"] for one in found} == {2 * saved[0]["steps"]}
    for stage in (0, 1):
        assert len({one["digest"] for one in found[stage::2]}) == 1
