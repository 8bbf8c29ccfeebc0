# SPDX-License-Identifier: Apache-2.0
"""A step that began and did not end: all ranks hear why, and none goes on until a load."""

import pytest

CASES = ["first/1f1b", "last/zbv", "first/pipemare", "last/pipemare", "loader/zb-h1"]
CASES += ["loader/pipemare", "optimizer/1f1b", "evaluation/1f1b", "evaluation/pipemare"]
CASES += ["evaluation/interleaved"]
REPLICAS = ["first/1f1b", "last/zb-h1"]
REASONS = {
    "loader": "OSError: the disk has gone",
    "first": "OutOfMemoryError: no memory for this pass",
    "last": "OutOfMemoryError: no memory for this pass",
    "evaluation": "OutOfMemoryError: no memory for this pass",
    "optimizer": "OutOfMemoryError: no memory for this step",
}


def check(name, results):
    reason = REASONS[name.split("/")[0]]
    told = []
    for found in results:
        assert found["losses"] == results[0]["losses"]
        first, *others = found["heard"]
        assert reason in first
        # A stage that had stepped before another one failed hears it in the next step.
        assert len(others) == (0 if first.startswith("CommError: optimizer step = 4") else 1)
        for heard in (*others, found["saved"]):
            assert heard.startswith("CommError: optimizer step = ")
            assert "began on this rank and did not end" in heard
        told.append(first.startswith("CommError: optimizer step = "))
    assert sum(told) == len(results) - 1


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_of_a_pipeline_hear_why_and_go_on_from_a_checkpoint(launch_once, name):
    results = [found[name] for found in launch_once("left_steps.py", *CASES)]
    check(name, results)
    assert {found["loaded"] for found in results} == {True}
    assert len({found["again"] for found in results}) == 1


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", REPLICAS)
def test_ranks_of_other_replicas_hear_it_too(launch_once, name):
    check(name, [found[name] for found in launch_once("left_steps.py", *REPLICAS, ranks=4)])
