# SPDX-License-Identifier: Apache-2.0
"""Several stages per rank train to the bits of 1F1B, where each weight is used once."""

from itertools import product

import pytest

CASES = [
    "gpt2-quiet-untied/fp32",
    "gpt2-quiet-untied/sgd-bf16",
    "gpt2-quiet-untied/sgd-checkpoints",
    "gpt2-quiet/sgd-zero",
]
REPLICAS = ["gpt2-quiet-untied/sgd-zero"]
HOMES = {"interleaved": [0, 1, 0, 1], "zbv": [0, 1, 1, 0], "auto": [0, 1, 1, 0]}
EQUAL = ("losses", "norms", "evaluation", "more", "weights", "loss")
FILES = {"zbv.csv": [0, 1, 1, 0], "zb-h1.csv": [0, 1], "by-hand.txt": [0, 1, 0]}
REFUSED = {
    "circle.txt": "wait for each other",
    "missing.txt": "next gradients of the weights are those of 1",
    "three-ranks.csv": "steps are (3, 6, 1), and the pipeline has (2, 4, 1)",
    "fewer.csv": "steps are (2, 3, 1), and the pipeline has (2, 4, 1)",
    "other stages": "on the ranks (0, 1, 1, 0), and those of the model on (0, 1)",
    "unlike zbv.csv": "the ranks' plans differ: rank 0 has ",
    "unlike zb-h1.csv": "No such file",
}

pytestmark = pytest.mark.world_size(2)


@pytest.mark.parametrize("case", CASES[:-1])
def test_all_placements_train_to_the_same_bits_also_when_clipped(launch_once, case):
    first, second = (results[case] for results in launch_once("chunked_engine.py", *CASES))
    reference = "zb-h1" if "sgd" in case else "1f1b"  # 1F1B clips by DeepSpeed's norm
    expected = first[reference]
    assert len(expected["weights"]) > 20
    logits = second[reference]["logits"]
    for schedule, homes in HOMES.items():
        found, other = first[schedule], second[schedule]
        assert found["homes"] == other["homes"] == homes
        assert found["kept"] == other["kept"] == 0, schedule
        for name in EQUAL:
            assert found[name] == expected[name], (schedule, name)
        assert (found if homes[-1] == 0 else other)["logits"] == logits != 0.0


@pytest.mark.world_size(4)
def test_partitions_that_cut_layers_clip_to_the_same_bits(launch_once):
    first = launch_once("chunked_engine.py", *REPLICAS, ranks=4)[0][REPLICAS[0]]
    assert first["zb-h1"]["norms"] == pytest.approx(first["1f1b"]["norms"], rel=1e-6)
    for schedule, name in product(HOMES, EQUAL):
        assert first[schedule][name] == first["zb-h1"][name], (schedule, name)


def test_clipped_weights_are_those_of_accumulation_in_one_process(launch_once):
    first = launch_once("chunked_engine.py", *CASES)[0]
    assert first["accumulated"] == first["gpt2-quiet-untied/sgd-checkpoints"]["zb-h1"]["weights"]


def test_a_v_has_one_copy_of_a_tied_embedding_and_two_count_once_when_clipped(launch_once):
    first, second = (results[CASES[-1]] for results in launch_once("chunked_engine.py", *CASES))
    embedding = 50 * 32
    sizes = {s: first[s]["parameters"] + second[s]["parameters"] for s in first}
    assert sizes["1f1b"] == sizes["interleaved"] == sizes["zbv"] + embedding
    for schedule in HOMES:
        for name in ("losses", "norms"):
            assert first[schedule][name] == pytest.approx(first["1f1b"][name], rel=1e-5), schedule


def test_a_model_that_is_cut_for_another_schedule_is_refused(launch_once):
    for results in launch_once("chunked_engine.py", *CASES):
        assert results["refused"].startswith("ConfigError")
        assert "on the ranks (0, 1), and those of the model on (0, 1, 1, 0)" in results["refused"]


def test_a_checkpoint_goes_on_in_its_placement_to_the_bit_and_in_others(launch_once):
    for results in launch_once("chunked_engine.py", *CASES):
        found = results["resumed"]
        assert found["resumed"] == found["whole"]
        assert found["other"] == pytest.approx(found["whole"]["losses"], rel=1e-3)
        assert found["loaded"] == found["saved"]


def test_plans_in_files_train_to_the_bits_of_1f1b(launch_once):
    results = launch_once("chunked_engine.py", *CASES)
    expected = results[0][CASES[0]]["1f1b"]
    for name, homes in FILES.items():
        for found in (result["files"][name] for result in results):
            assert found["homes"] == homes
            assert "the pipeline has (2, 8, 1)" in found["larger"], name
            assert found["size"] == 8, name
        for key in EQUAL[:-1]:
            assert results[0]["files"][name][key] == expected[key], (name, key)


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_in_a_file_is_refused_on_all_ranks_alike(launch_once, name):
    first, second = (result["files"][name] for result in launch_once("chunked_engine.py", *CASES))
    assert first.startswith("ConfigError" if name == "other stages" else "PlanError")
    assert REFUSED[name] in first
    assert first == second


def test_auto_takes_another_plan_within_its_limit_and_keeps_the_bits_of_1f1b(launch_once):
    results = launch_once("chunked_engine.py", *CASES)
    expected = results[0][CASES[0]]["1f1b"]
    for key in EQUAL:
        assert results[0]["limited"][key] == expected[key], key
    for found in (result["limited"] for result in results):
        before, after = found["plans"]
        assert before != after == found["ran"]
        assert found["peaks"] == [[1.5, 1.5]] * 2
