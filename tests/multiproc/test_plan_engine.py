# SPDX-License-Identifier: Apache-2.0
"""Plans with split backward passes train to the bits of 1F1B."""

import pytest

CASES = [
    "gpt2/fp32",
    "gpt2-untied/clipped",
    "bert/bf16",
    "gpt2/bf16-at-once",
    "gpt2/zero",
    "bert/reentrant",
    "gpt2/checkpoints",
    "bert/bf16-zero",
]


pytestmark = pytest.mark.world_size(2)


@pytest.mark.parametrize("case", CASES)
def test_split_backward_passes_train_to_the_bits_of_1f1b(launch_once, case):
    for results in launch_once("plan_engine.py", *CASES):
        expected = results[case].pop("1f1b")
        assert expected.pop("engine") == "PipelineEngine"
        assert len(set(expected["losses"])) > 1
        assert expected.pop("kept") == []
        for name, found in results[case].items():
            assert found.pop("engine") == "PlanEngine"
            assert len(set(found["kept"])) == 1
            assert len(found["kept"]) == 12
            assert min(found.pop("kept")) > 0
            assert found == expected, name


def test_a_plan_for_another_pipeline_is_refused(launch_once):
    for results in launch_once("plan_engine.py", *CASES):
        assert "this pipeline needs (1, 2, 4, (0, 1))" in results["fewer micro-batches"]
        assert results["blocking sends"].startswith("PlanError: plan = '1f1b")
        assert "send_slots 0" in results["blocking sends"]
