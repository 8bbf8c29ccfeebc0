# SPDX-License-Identifier: Apache-2.0
"""Plans with split backward passes train to the bits of 1F1B."""

import pytest

CASES = [
    "gpt2-untied/fp32",
    "gpt2/fp32",
    "gpt2-untied/clipped",
    "gpt2-untied/bf16",
    "bert/bf16",
    "gpt2/bf16-at-once",
    "gpt2-untied/zero",
    "bert/reentrant",
    "gpt2/checkpoints",
    "gpt2-untied/bf16-zero",
]
REPLICAS = ["gpt2/sparse", "gpt2-untied/sparse-zero", "gpt2/bf16-zero"]


def check_equal(results, names):
    expected = results.pop("1f1b")
    assert len(set(expected["losses"])) > 1
    assert expected.pop("kept") == []
    assert set(results) == set(names)
    for name, found in results.items():
        assert len(set(found["kept"])) == 1
        assert len(found["kept"]) == 12
        assert min(found.pop("kept")) > 0
        assert found == expected, name


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES)
def test_split_backward_passes_train_to_the_bits_of_1f1b(launch_once, case):
    for results in launch_once("plan_engine.py", *CASES):
        check_equal(results[case], ["zb-h1", "by hand"])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", REPLICAS)
def test_replicas_of_split_passes_train_to_the_bits_of_1f1b(launch_once, case):
    for results in launch_once("plan_engine.py", *REPLICAS, ranks=4):
        check_equal(results[case], ["zb-h1"])


@pytest.mark.world_size(2)
def test_a_checkpoint_goes_on_in_either_schedule_to_the_bit(launch_once):
    for results in launch_once("plan_engine.py", *CASES):
        found = results["resumed"]
        assert found["whole"] == found["zb-h1"] == found["1f1b"]
        assert found["zb-h1, larger"] == found["1f1b, larger"]


@pytest.mark.world_size(2)
def test_a_step_without_data_is_left_out_and_one_that_began_is_the_last_on_all_ranks(launch_once):
    for results in launch_once("plan_engine.py", *CASES):
        found = results["short of data"]
        assert found["after"]["weights"] == found["as"]["weights"]
        assert found["after"]["losses"] == found["as"]["losses"][1:]
        assert found["ended"].startswith(("DataError: data_iter = 1: ", "CommError: "))
        assert "began on this rank and did not end" in found["refused"]
        assert found["refused"].startswith("CommError: optimizer step = 4: ")


@pytest.mark.world_size(2)
def test_a_plan_for_another_pipeline_or_another_rank_is_refused(launch_once):
    for results in launch_once("plan_engine.py", *CASES):
        assert results["fewer micro-batches"].startswith("PlanError: plan = 'zb-h1'")
        assert results["unlike plans"].startswith("PlanError: plan = ")
