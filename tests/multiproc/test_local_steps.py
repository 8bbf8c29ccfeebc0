# SPDX-License-Identifier: Apache-2.0
"""Local steps: replicas do what a slow twin does, and what a user relies on."""

import json
from functools import partial

import numpy as np
import pytest

from support.message_twin import bytes_sent

KEY = "wavemare.local_steps"
HEADER = 48  # bytes
AVERAGE = {"mode": "average", "every": 3}
DILOCO = {"mode": "diloco", "every": 4, "outer": {"lr": 0.7, "momentum": 0.9}}
STREAM = {"mode": "diloco", "every": 4, "fragments": 2, "overlap": 1}
FOUR = {**STREAM, "bits": 4}
WARM = {"mode": "diloco", "every": 4, "warmup_steps": 1}  # which no message's bytes count
EACH = {"mode": "average", "every": 1}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "steps": 4}
SUM = {**SGD, "gradient_allreduce_op": "sum"}
FROZEN = {"frozen": {"0": ["h.1", "wte"], "2": ["wpe", "h.0"], "4": ["h.0"]}, "steps": 6}
BF16 = {"bf16": {"enabled": True}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1}}}
TWO = {**STREAM, "bits": 2}
OFTEN = {"mode": "average", "every": 2, "bits": 2}
TWINS = {
    "average": {"local": AVERAGE},
    "diloco": {"local": DILOCO},
    "stream": {"local": STREAM},
    # The whole is sent in the step in which the message before it is due.
    "replace": {"local": {"mode": "diloco", "every": 3, "overlap": 3, "mixing": "replace"}},
    "zero": {"local": STREAM, "zero": 1},
    "muon": {"local": STREAM, **MUON},
    "zero muon": {"local": DILOCO, "zero": 1, **MUON},
    "4 bits": {"local": FOUR},
    "2 bits": {"local": OFTEN, **MUON},
}
RESUMED = {
    "resume 0": {"local": FOUR, "before": 6},
    "resume 1": {"local": {**STREAM, "overlap": 2}, "before": 7, "zero": 1},
    "resume 2": {"local": {**FOUR, "bits": 8}, "before": 6, "zero": 2, **BF16},
    "resume muon": {"local": {**OFTEN, "overlap": 1}, "before": 4, "zero": 1, **MUON},
}
CASES = {
    2: {
        **{name: ["twin", settings] for name, settings in TWINS.items()},
        **{name: ["resume", {"name": name, **settings}] for name, settings in RESUMED.items()},
        "each": ["train", {"local": EACH, **SGD}],
        "synchronous": ["train", {"local": None, **SGD}],
        "each frozen": ["train", {"local": EACH, **SGD, **FROZEN}],
        "synchronous frozen": ["train", {"local": None, **SGD, **FROZEN}],
        "stream frozen": ["train", {"local": STREAM, "steps": 7, **FROZEN}],
        "warm-up": ["train", {"local": {**STREAM, "warmup_steps": 4}, "steps": 4, "clip": 0.1}],
        "synchronous warm-up": ["train", {"local": None, "steps": 4, "clip": 0.1}],
        "sum": ["train", {"local": {**STREAM, "warmup_steps": 4}, **SUM}],
        "synchronous sum": ["train", {"local": None, **SUM}],
        "exact": ["train", {"local": WARM, "steps": 9}],
        "8 bits lost": ["train", {"local": {**WARM, "bits": 8}, "steps": 9}],
        "4 bits lost": ["train", {"local": {**WARM, "bits": 4}, "steps": 9}],
        "plain": ["train", {"local": STREAM, "steps": 6}],
        "bf16": ["train", {"local": STREAM, "steps": 6, "zero": 1, **BF16}],
        "waves": [
            "train",
            {"local": STREAM, "steps": 6, "wavemare": {"wavelet": {"mode": "sync"}}},
        ],
        "carry": ["conserved", {"local": {**AVERAGE, "fragments": 3, "overlap": 1}}],
        "sooner": ["conserved", {"local": {**AVERAGE, "every": 4, "overlap": 4}, "then": AVERAGE}],
        "traps 0": ["traps", {"local": {"mode": "diloco", "every": 4}, "zero": 0}],
        "traps 1": ["traps", {"local": {"mode": "diloco", "every": 4}, "zero": 1}],
        "statistics": ["statistics", {"local": AVERAGE}],
        "trainer": ["trainer", {"local": STREAM}],
        "unlike every": ["unlike", {"local": DILOCO, "other": {**DILOCO, "every": 8}}],
        "out of step": ["out_of_step", {"local": AVERAGE | {"every": 1}}],
        "experts": ["experts", {"local": AVERAGE}],
    },
    4: {
        "2 x 2": ["twin", {"local": {**STREAM, "replica": 2}, "zero": 1}],
        "2 x 2 plain": ["twin", {"local": {**STREAM, "replica": 2}}],
        "2 x 2 bf16": ["train", {"local": {**FOUR, "replica": 2}, "zero": 2, "steps": 6, **BF16}],
        "2 x 2 resumed": [
            "resume",
            {"name": "2 x 2", "local": {**FOUR, "replica": 2}, "zero": 2, "before": 6},
        ],
        "2 x 2 muon": ["twin", {"local": {**DILOCO, "replica": 2}, "zero": 1, **MUON}],
        "2 bits of 4": ["twin", {"local": TWO}],
    },
}


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "local_steps.py", CASES)


def same(values):
    return len(set(values)) == 1


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", TWINS)
def test_replicas_have_the_bits_of_a_slow_twin(found, case):
    results = found(case)
    for result in results:
        assert all(result["equal"]), result["furthest"]
        told = set().union(*result["metrics"])
        assert told == {"drift", "outer_wait_seconds", "outer_bytes", "replica_loss"}
    assert same(result["digest"] for result in results)  # after synchronize()
    assert max(result["off"] for result in results) < 1e-6


@pytest.mark.world_size(2)
def test_an_average_in_each_step_is_synchronous_sgd(found):
    """A wrong sign, or changes that are applied twice, would diverge."""
    for ours, stock in zip(found("each"), found("synchronous"), strict=True):
        assert np.allclose(ours["weights"], stock["weights"], atol=1e-6)
        assert ours["moved"] == 0.0  # without overlap all are in step after each exchange


@pytest.mark.world_size(2)
def test_layers_are_frozen_and_thawed_in_training(found):
    for ours, stock in zip(found("each frozen"), found("synchronous frozen"), strict=True):
        assert np.allclose(ours["weights"], stock["weights"], atol=1e-6)
    assert not np.allclose(ours["weights"], found("each")[0]["weights"], atol=1e-4)
    results = found("stream frozen")
    assert same(result["digest"] for result in results)
    assert all(result["moved"] > 0 for result in results)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["warm-up", "sum"])
def test_a_warm_up_is_synchronous_training_bit_for_bit(found, case):
    for ours, stock in zip(found(case), found(f"synchronous {case}"), strict=True):
        assert ours["digest"] == stock["digest"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["carry", "sooner"])
def test_exchanges_keep_the_sum_of_the_weights(found, case):
    for result in found(case):
        assert max(result["differences"]) < 1e-6
    assert same(result["digest"] for result in found(case))  # nothing is left to exchange


@pytest.mark.world_size(2)
def test_few_bits_lose_little_and_travel_little(found):
    exact = found("exact")
    weights = len(exact[0]["weights"])
    for case, bits in (("8 bits lost", 8), ("4 bits lost", 4)):
        results = found(case)
        assert same(result["digest"] for result in results)
        pair = np.array(results[0]["weights"]), np.array(exact[0]["weights"])
        assert 0 < np.abs(pair[0] - pair[1]).max() < 0.4 / 2**bits
        for rank, result in enumerate(results):
            sent = bytes_sent(weights, 2, rank, bits)
            assert result["metrics"]["outer_bytes"] == sent + HEADER
    sent = sum(result["metrics"]["outer_bytes"] for result in exact)
    assert sent == 2 * 4 * weights + 2 * HEADER


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("case", "off"), [("bf16", 0.02), ("waves", 1e-5)])
def test_half_weights_and_waves_train_alike(found, case, off):
    results, plain = found(case), np.array(found("plain")[0]["weights"])
    assert same(result["digest"] for result in results)
    for result in results:
        assert result["moved"] > 0  # by synchronize()
        assert np.abs(np.array(result["weights"]) - plain).mean() < off


@pytest.mark.world_size(2)
@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_share_batch_data_weights_and_folder(found, zero):
    results = found(f"traps {zero}")
    assert same(result["first"] for result in results)
    assert sorted(results[0]["seen"] + results[1]["seen"]) == list(range(64))
    optimizer = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    files = ["mp_rank_00_model_states.pt", *([optimizer] if zero else [])]
    own = [f"wavemare_rank_{rank:05d}_state.pt" for rank in range(2)]
    for rank, result in enumerate(results):
        assert (result["batch"], result["accumulation"], result["samples"]) == (16, 4, 4 * 8)
        assert result["data"] == [rank, 2]
        assert "multiple of the 2 replicas" in result["refusal"]
        assert result["files"] == sorted([*files, *(f"replicas/1/{f}" for f in files), *own])
    ours, theirs = (result["losses"] for result in results)
    assert ours != theirs  # each its own, without a wait
    mean = (sum(ours) + sum(theirs)) / 8
    assert results[0]["replica_loss"] == results[1]["replica_loss"] == pytest.approx(mean)
    assert same(result["evaluated"] for result in results)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", RESUMED)
def test_a_run_resumed_with_a_message_in_flight_has_the_same_bits(found, case):
    for result in found(case):
        assert result["resumed"] == result["whole"]


@pytest.mark.world_size(2)
def test_statistics_of_batch_normalization_are_averaged(found):
    results = found("statistics")
    mean = np.mean([result["before"] for result in results], axis=0)
    for result in results:
        assert np.allclose(result["after"], mean, atol=1e-7)
        assert result["before"] != result["after"]


@pytest.mark.world_size(2)
def test_a_trainer_saves_the_weights_that_all_replicas_have(found):
    for result in found("trainer"):
        assert result["batch"] == 2 * 2 * 2
        assert result["moved"] > 0 == result["off"]
        assert len(result["losses"]) == 6
        assert result["losses"][-1] < result["losses"][0]


@pytest.mark.world_size(2)
def test_ranks_that_differ_are_told_alike(found):
    for said in found("unlike every"):
        assert said.startswith(f"ConfigError: {KEY} = ")
        assert "rank 1 has" in said
        assert '"every":8' in said
    for said in found("experts"):
        assert "DeepSpeed's layers of experts" in said
    for rank, said in enumerate(found("out of step")):
        assert f"CommError: {KEY} = " in said[0]
        assert f"the message of rank {1 - rank} differs: step {2 - rank}" in said[0]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", ["2 x 2", "2 x 2 plain", "2 x 2 muon", "2 bits of 4"])
def test_more_ranks_have_the_bits_of_a_slow_twin(found, case):
    results = found(case)
    for result in results:
        assert all(result["equal"]), result["furthest"]
    assert same(result["digest"] for result in results)


@pytest.mark.world_size(4)
def test_hosts_of_two_ranks_with_half_weights_resume(found):
    assert same(result["digest"] for result in found("2 x 2 bf16"))
    for result in found("2 x 2 resumed"):
        assert result["resumed"] == result["whole"]


@pytest.mark.world_size(4)
def test_another_number_of_replicas_goes_on_from_the_common_weights(launch, tmp_path):
    """Two replicas save; four, two of other fragments, and none go on."""

    def run(ranks, name, **cases):
        folder = tmp_path / name
        folder.mkdir()
        finished = launch("local_steps.py", json.dumps(cases), ranks=ranks, folder=folder)
        finished.check()
        return [finished.result(rank) for rank in range(ranks)]

    cases, folders = {}, {zero: str(tmp_path / f"saved{zero}") for zero in (0, 1)}
    for zero, folder in folders.items():
        settings = {"folder": folder, "steps": 6, "zero": zero}
        cases[f"save {zero}"] = ["save", {"local": STREAM, **settings}]
        other = {"local": {**STREAM, "fragments": 1}, "folder": folder, "zero": zero}
        cases[f"fragments {zero}"] = ["load", other]
        cases[f"off {zero}"] = ["load", {"local": None, "folder": folder, "zero": zero}]
    cases["alone"] = ["load", {"local": STREAM, "folder": folders[0], "alone": True}]
    cases["off alone"] = ["load", {"local": None, "folder": folders[0], "alone": True}]
    cases["warmer"] = ["load", {"local": {**STREAM, "warmup_steps": 7}, "folder": folders[0]}]
    warm = {"local": {**STREAM, "warmup_steps": 4}, "folder": str(tmp_path / "warm")}
    two = run(2, "two", **cases, warm=["save", {**warm, "steps": 2}])
    for result in two:
        assert "not the common ones" in result["alone"]["said"]
        assert "not the common ones" in result["off alone"]["said"]
        assert f"{KEY}.warmup_steps = 7: " in result["warmer"]["said"]
        assert "Give 6 or less" in result["warmer"]["said"]
        for zero in (0, 1):
            assert "TopologyError" in result[f"fragments {zero}"]["said"]
            assert "replicas 2" in result[f"off {zero}"]["said"]
            assert "or go on from a model" in result[f"off {zero}"]["said"]
    four = {f"{z}": ["load", {"local": STREAM, "folder": f, "zero": z}] for z, f in folders.items()}
    results = run(4, "four", **four, warm=["load", warm])
    assert same(one["warm"]["digest"] for one in results)
    assert results[0]["warm"]["digest"] == two[0]["warm"]
    for zero in "01":
        found = [result[zero] for result in results]
        assert {one["said"] for one in found} == {"accepted"}
        assert {one["steps"] for one in found} == {6}
        assert same(one["digest"] for one in found)
        assert same(one["end"] for one in found)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("guard", ["off", "stop"])
def test_all_replicas_stop_soon_after_one_diverges(launch, tmp_path, guard):
    settings = {"local": {"mode": "average", "every": 4}, "guard": guard}
    cases = {"nan": ["diverged", settings]}
    if guard == "off":
        cases["synchronized"] = ["diverged", {**settings, "synchronizes": True}]
        cases["sparse"] = ["sparse", {"local": WARM}]
    finished = launch("local_steps.py", json.dumps(cases), folder=tmp_path)
    if guard == "off":
        for rank in range(2):
            for case, last in (("nan", 4), ("synchronized", 3)):
                step, said = finished.check().result(rank)[case]
                assert step == last
                assert f"NumericsError: {KEY} = 0: the mean change" in said
            assert f"{KEY}.warmup_steps = 1: " in finished.result(rank)["sparse"]
    else:
        assert finished.result(1)["nan"][0] == 3
        assert "NumericsError" in finished.result(1)["nan"][1]


@pytest.mark.world_size(2)
def test_a_lost_replica_ends_the_run_with_one_message(launch):
    cases = {"lost": ("lost", {"local": {"mode": "average", "every": 2}})}
    finished = launch("local_steps.py", json.dumps(cases), own=True)
    assert finished.codes[0] == 1
    [line] = [line for line in finished.outputs[0].splitlines() if line.startswith("error")]
    assert "rank = '1': lost" in line
    assert "Traceback" not in finished.outputs[0]
