# SPDX-License-Identifier: Apache-2.0
"""Several stages per rank train to the bits of 1F1B, where each weight is used once."""

import pytest

CASES = [
    "gpt2-quiet-untied/fp32",
    "gpt2-quiet-untied/zero-unclipped",
    "gpt2-quiet-untied/bf16-unclipped",
    "gpt2-quiet-untied/checkpoints-unclipped",
    "gpt2-quiet/fp32",
]
HOMES = {"interleaved": [0, 1, 0, 1], "zbv": [0, 1, 1, 0], "auto": [0, 1, 1, 0]}

pytestmark = pytest.mark.world_size(2)


@pytest.mark.parametrize("case", CASES[:-1])
def test_several_stages_per_rank_train_to_the_bits_of_1f1b(launch_once, case):
    first, second = (results[case] for results in launch_once("chunked_engine.py", *CASES))
    expected = first["1f1b"]
    assert len(expected["weights"]) > 20
    logits = second["1f1b"]["logits"]
    for schedule, homes in HOMES.items():
        found, other = first[schedule], second[schedule]
        assert found["homes"] == other["homes"] == homes
        for name in ("losses", "evaluation", "more", "weights"):
            assert found[name] == expected[name], (schedule, name)
        assert (found if homes[-1] == 0 else other)["logits"] == logits != 0.0


def test_a_v_has_one_copy_of_a_tied_embedding(launch_once):
    first, second = (
        results["gpt2-quiet/fp32"] for results in launch_once("chunked_engine.py", *CASES)
    )
    embedding = 50 * 32
    sizes = {s: first[s]["parameters"] + second[s]["parameters"] for s in first}
    assert sizes["1f1b"] == sizes["interleaved"] == sizes["zbv"] + embedding
    for schedule in HOMES:
        assert first[schedule]["losses"] == pytest.approx(first["1f1b"]["losses"], abs=1e-5)


def test_a_model_that_is_cut_for_another_schedule_is_refused(launch_once):
    for results in launch_once("chunked_engine.py", *CASES):
        assert results["refused"].startswith("ConfigError")
        assert "on the ranks (0, 1), and those of the model on (0, 1, 1, 0)" in results["refused"]


def test_a_checkpoint_belongs_to_its_placement_and_its_weights_to_all(launch_once):
    for results in launch_once("chunked_engine.py", *CASES):
        found = results["resumed"]
        assert found["resumed"] == found["whole"]
        assert "cuts" in found["other"]
        assert found["other"].startswith("TopologyError")
        assert found["loaded"] == found["saved"]
