# SPDX-License-Identifier: Apache-2.0
"""SOAP, Muon and NAdam in all engines: ZeRO changes nothing, runs resume, misfits are refused.

SOAP's bases depend on the last digits of small gradients, so that paths are equal to the bit or not
at all: ranks add in one order, or all have the same data, and each process begins alike.
"""

import json
import subprocess
import sys

import pytest

from wavemare.optim import refresh_of

KINDS = ["SOAP", "Muon", "NAdam"]


def run(launch_once, cases, ranks=2):
    return launch_once("optimizers.py", json.dumps(cases), ranks=ranks, own=True)


def check_equal(found, expected):
    assert found["losses"] == expected["losses"]
    assert found["digest"] == expected["digest"]
    assert found["losses"][-1] < found["losses"][0] - 0.05  # it does train


def test_zero_changes_no_bit_on_two_ranks(launch_once):
    both = [("data", "SOAP"), ("data", "NAdam"), ("1f1b", "Muon")]
    cases = [
        {"engine": engine, "type": kind, "zero": zero} for engine, kind in both for zero in (0, 1)
    ]
    # With one micro-batch per step ZeRO 2 adds in the same order.
    cases += [
        {"engine": "data", "type": "SOAP", "zero": zero, "accumulation": 1} for zero in (0, 2)
    ]
    cases += [{**cases[1], "zero_options": {"round_robin_gradients": True}}]
    for found in run(launch_once, cases):
        for i in range(0, 8, 2):
            check_equal(found[i + 1], found[i])
            assert found[i + 1]["wrapper"] == "DeepSpeedZeroOptimizer"
            # A matrix does lie on both ranks.
            assert bool(found[i + 1]["cut"]) == (cases[i]["type"] != "NAdam")
        check_equal(found[8], found[0])


def test_two_ranks_train_in_bf16_as_one(launch_once, tmp_path):
    cases = [
        {"engine": "1f1b", "type": kind, "zero": zero, "alike": True, "bf16": True}
        for kind in KINDS
        for zero in (0, 1)
    ]
    expected = run(launch_once, cases, ranks=1)[0]
    for found in run(launch_once, cases):
        for case, whole, cut in zip(cases, expected, found, strict=True):
            check_equal(cut, whole)
            wrapper = "DeepSpeedZeroOptimizer" if case["zero"] else "BF16_Optimizer"
            assert cut["wrapper"] == wrapper
            assert bool(cut["cut"]) == (case["type"] != "NAdam")
            assert not whole["cut"]


@pytest.mark.parametrize("engine", ["pipemare", "1f1b"])
def test_stages_step_their_own_matrices(launch_once, engine):
    cases = [
        {"engine": engine, "type": kind, "zero": zero, "stages": 2, "bf16": bf16}
        for kind in KINDS
        for bf16 in (False, True)
        for zero in (0, 1)
    ]
    cases += [{**cases[i], "clip": 0.05} for i in (4, 5)]
    cases += [{**cases[4], "grouped": True}]
    found = run(launch_once, cases)
    assert [rank[0]["stage"] for rank in found] == [0, 1]
    for stage, results in enumerate(found):
        for i in range(0, 12, 4):
            check_equal(results[i + 1], results[i])
            assert results[i + 2]["losses"][-1] < results[i + 2]["losses"][0] - 0.05
            assert results[i + 3]["losses"][-1] < results[i + 3]["losses"][0] - 0.05
        refresh = refresh_of(stage, 2, 3) if engine == "pipemare" else 3
        assert results[0]["refresh"] == [refresh]
        muon, clipped, cut = (results[i] for i in (4, 12, 13))
        # What is clipped are gradients, not orthogonal updates; norms differ in the last digits.
        assert cut["losses"] == pytest.approx(clipped["losses"], abs=0.02)
        assert cut["losses"][-1] < cut["losses"][0] - 0.2
        assert muon["muon"] == [True, False]
        check_equal(results[14], muon)  # blocks stay hidden in a part that ends with the head
        assert muon["rates"] == [0.05, 0.01]
        # The embedding's and the head's weights, biases and norms go to AdamW.
        assert {len(shape) for shape in muon["shapes"][0]} == {2}
        assert [23, 12] not in muon["shapes"][0]
        assert [23, 12] in muon["shapes"][1]
    kinds = [found[0][i]["kind"].rpartition(".")[2] for i in (0, 4, 8)]
    assert kinds == KINDS


@pytest.mark.nightly
def test_replicas_of_asynchronous_stages_train_as_one(launch_once, tmp_path):
    cases = [
        {"engine": "pipemare", "type": kind, "zero": zero, "stages": 2, "alike": True, "bf16": bf16}
        for kind in KINDS
        for zero, bf16 in ((0, False), (1, False), (0, True))
    ]
    expected = run(launch_once, cases, ranks=2)
    found = run(launch_once, cases, ranks=4)
    for rank in range(4):
        for i, case in enumerate(cases):
            result = found[rank][i]
            check_equal(result, expected[result["stage"]][i])
            partitioned = case["zero"] or case["bf16"]
            assert bool(result["cut"]) == bool(partitioned and case["type"] != "NAdam")


CHECKPOINTS = [
    {"engine": "data", "type": "SOAP", "zero": 1},
    {"engine": "1f1b", "type": "SOAP", "zero": 0, "stages": 2},
    {"engine": "1f1b", "type": "SOAP", "zero": 1, "stages": 2},
    {"engine": "pipemare", "type": "SOAP", "zero": 0, "stages": 2},
    {"engine": "pipemare", "type": "SOAP", "zero": 1, "stages": 2},
    {"engine": "pipemare", "type": "SOAP", "zero": 1, "stages": 2, "bf16": True},
    {"engine": "pipemare", "type": "Muon", "zero": 1, "stages": 2},
    {"engine": "pipemare", "type": "NAdam", "zero": 1, "stages": 2},
]


def test_resumed_runs_equal_uninterrupted_ones_and_universal_ones_are_refused(
    launch_once, tmp_path
):
    cases = []
    for i, case in enumerate(CHECKPOINTS):
        folder = str(tmp_path / f"saved-{i}")
        cases += [{**case, "folder": folder, how: 4} for how in ("save", "resume")]
    cases += [{**cases[i], "resume": 4, "save": None, "universal": True} for i in (4, 8, 12, 14)]
    for found in run(launch_once, cases):
        for i in range(0, 2 * len(CHECKPOINTS), 2):
            whole, resumed = found[i : i + 2]
            assert len(resumed["losses"]) == 4, cases[i]
            assert resumed["losses"] == whole["losses"][4:], cases[i]
            assert resumed["digest"] == whole["digest"], cases[i]
        for refused in found[2 * len(CHECKPOINTS) :]:
            assert refused["error"] == "CheckpointError"
            assert "a universal checkpoint keeps only Adam's averages" in refused["message"]
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    source = ["--input_folder", str(tmp_path / "saved-4" / "global_step4")]
    command = [*tool, *source, "--output_folder", str(tmp_path / "universal")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "universal_checkpoint_info state is missing" in done.stderr


FED = {"error_feedback": True, "discrepancy_correction": {"mode": "predict"}}
POLICY = {"optimizer_policy": "auto"}
BARE = {**POLICY, "error_feedback": False, "discrepancy_correction": {"mode": "off"}}
REPLICAS = {"engine": "pipemare", "zero": 1, "stages": 2, "pipemare": FED}
# One start of four ranks for all: two stages of two replicas.
GRID = [
    {**REPLICAS, "type": "SOAP", "folder": "soap", "save": 4},
    {**REPLICAS, "type": "SOAP", "folder": "soap", "resume": 4},
    {**REPLICAS, "type": "AdamW", "bf16": True, "folder": "adamw", "save": 4},
    {**REPLICAS, "type": "AdamW", "bf16": True, "folder": "adamw", "resume": 4},
    {**REPLICAS, "type": "SOAP", "pipemare": {}},
    # With slack two stages are as stale as five without.
    {**REPLICAS, "type": "AdamW", "pipemare": {"optimizer_policy": "auto", "slack": 3}, "steps": 1},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "folder": "muon", "save": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "folder": "muon", "resume": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "zero": 0, "folder": "muon0", "save": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "zero": 0, "folder": "muon0", "resume": 4},
    # The policy would take Muon: a resume keeps the optimizer of the checkpoint.
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "folder": "soap", "resume": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "bf16": True, "folder": "adamw", "resume": 4},
    {**REPLICAS, "type": "SOAP", "zero": 0, "pipemare": {}, "folder": "soap0", "save": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "zero": 0, "folder": "soap0", "resume": 4},
    # The caller's own choice stays.
    {**REPLICAS, "type": "AdamW", "pipemare": {}, "folder": "muon", "resume": 4},
    {**REPLICAS, "type": "SOAP", "pipemare": POLICY, "folder": "muon", "resume": 4},
    # The policy's own optimizer, without what it would do beside it.
    {**REPLICAS, "type": "AdamW", "pipemare": BARE, "folder": "bare", "save": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "folder": "bare", "resume": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": {**BARE, **FED}, "folder": "bare", "resume": 4},
    # Of a synchronous run, and by one.
    {**REPLICAS, "engine": "1f1b", "type": "SOAP", "folder": "flushed", "save": 4},
    {**REPLICAS, "type": "AdamW", "pipemare": POLICY, "folder": "flushed", "resume": 4},
    {**REPLICAS, "engine": "1f1b", "type": "SOAP", "folder": "soap", "resume": 4},
]


@pytest.fixture
def grid(launch_once):
    return launch_once("optimizers.py", json.dumps(GRID), ranks=4)


@pytest.mark.world_size(4)
def test_replicas_of_stages_with_feedback_and_prediction_resume_to_the_bit(grid):
    for results in grid:
        for i in (0, 2, 6, 8):
            whole, resumed = results[i : i + 2]
            assert len(resumed["losses"]) == 4
            assert resumed["losses"] == whole["losses"][4:]
            assert resumed["digest"] == whole["digest"]
            assert (whole["wrapper"] == "DeepSpeedZeroOptimizer") == (i < 8)
        muon, without_zero = results[6], results[8]
        assert muon["kind"].endswith(".Muon")
        assert muon["cut"]  # a matrix lies on both replicas, and one of them steps it
        check_equal(muon, without_zero)
    for place in range(4):  # replicas agree, though their data do not, and stages are two
        digests = [results[place]["digest"] for results in grid]
        assert digests[0] == digests[1] != digests[2] == digests[3]
    fed, plain = grid[0][0], grid[0][4]
    assert fed["losses"] != plain["losses"]  # the settings are at work


@pytest.mark.world_size(4)
def test_a_resume_under_the_policy_keeps_the_optimizer_of_the_checkpoint(grid):
    """To the bit: feedback and prediction, where they were at work, go on as well."""
    for rank, results in enumerate(grid):
        for written, resumed, kind in ((0, 10, "SOAP"), (2, 11, "AdamW"), (12, 13, "SOAP")):
            whole, kept = results[written], results[resumed]
            assert kept["losses"] == whole["losses"][4:], written
            assert kept["digest"] == whole["digest"]
            assert kept["kind"] == whole["kind"]
            assert kept["kind"].endswith(f".{kind}")
            assert kept["wrapper"] == whole["wrapper"]
            assert len(kept["chosen"]) == (2 if rank == 0 else 0)
            assert all(f" auto: {kind.removesuffix('W')}: " in line for line in kept["chosen"][1:])


@pytest.mark.world_size(4)
def test_a_checkpoint_of_another_optimizer_than_the_configurations_is_refused(grid):
    for results in grid:
        for refused in results[14:16]:
            assert refused["error"] == "CheckpointError"
            assert '{"type": "Muon", ...}' in refused["message"]


@pytest.mark.world_size(4)
def test_a_resume_says_what_it_does_otherwise_than_the_checkpoints_run(grid):
    for rank, results in enumerate(grid):
        bare, kept, other, flushed, stale, again = results[16:]
        assert kept["remedies"] == bare["remedies"] == [False, "off"]
        assert kept["losses"] == bare["losses"][4:]
        assert kept["digest"] == bare["digest"]
        assert other["remedies"] == [True, "predict"]
        assert len(other["told"]) == (rank == 0)
        assert all("error_feedback was off, and is on" in line for line in other["told"])
        assert stale["kind"] == flushed["kind"]
        assert stale["remedies"] == [True, "predict"]  # the policy's, for SOAP
        # A synchronous step has nothing to correct, and keeps no update for it.
        assert again["previous updates"] == 0
        assert again["kind"] == results[0]["kind"]
        for quiet in (bare, kept, flushed, stale, again):
            assert quiet["told"] == []
    assert grid[0][0]["previous updates"] > 0  # on the stale stage


@pytest.mark.world_size(4)
def test_the_first_rank_alone_tells_how_stale_gradients_are_and_what_the_policy_chose(grid):
    assert grid[0][5]["told"] == [
        "pipemare: 2 micro-batches per optimizer step on 2 stages make the first stage's gradients "
        "up to 2 steps old (2.00 on average); with 4 or more (gradient_accumulation_steps, or a "
        "smaller train_micro_batch_size_per_gpu) none is older than 1",
    ]
    (chosen,) = grid[0][5]["chosen"]
    start = "wavemare.pipeline.pipemare.optimizer_policy auto: Muon in place of AdamW: "
    assert chosen.startswith(start + "gradients are up to 2 steps old")
    assert all(results[5]["told"] == results[5]["chosen"] == [] for results in grid[1:])
    assert all(results[5]["kind"].endswith(".Muon") for results in grid)
    (kept,) = grid[0][2]["told"]
    assert "optimizer_policy keep: AdamW stays" in kept
    assert all(results[2]["told"] == [] for results in grid[1:])
    assert all(results[i]["told"] == [] for results in grid for i in (0, 1, 4))
