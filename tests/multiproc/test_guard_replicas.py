# SPDX-License-Identifier: Apache-2.0
"""What one rank sees alone: all that step with it decide alike, and all stop together."""

from functools import partial

import pytest

pytestmark = pytest.mark.world_size(4)

SKIPPED, ALL = [True, True, False, True, True, True], [True] * 6
TOKENS = {"balance": {"mean": "tokens"}}
SCHEDULES = ("1f1b", "pipemare")


def replicas(what, schedule, policy, bad_rank, **sections):
    given = {"what": what, "schedule": schedule, "policy": policy, "bad_rank": bad_rank}
    return ["replicas", {**given, **sections}]


# Ranks 0 and 1 are the first stage, 2 and 3 the second.
CASES = {
    4: {
        **{f"mask {schedule}": replicas("mask", schedule, "skip", 1) for schedule in SCHEDULES},
        **{
            f"tokens {schedule} {policy}": replicas("activation", schedule, policy, 3, **TOKENS)
            for schedule in SCHEDULES
            for policy in ("skip", "stop")
        },
        "arrived": replicas("activation", "pipemare", "stop", 1),
        "after reduction": ["after_reduction", {"bad_rank": 2}],
        "grid": ["grid", {"bad_rank": 1}],
        "slice": ["split", {"schedule": "pipemare"}],
    }
}


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "guard_replicas.py", CASES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_made_of_an_activation_that_the_next_stage_bears(found, schedule):
    for ours in found(f"mask {schedule}"):
        assert ours["applied"] == ALL
        assert ours["finite"]
        assert ours["said"] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_replicas_of_a_stage_skip_the_step_of_one_of_them(found, schedule):
    where = "rank 3 (stage 1), micro-batch 2: the loss"
    results = found(f"tokens {schedule} skip")
    for ours in results:
        assert ours["applied"] == SKIPPED
        assert ours["finite"]
    digests = [ours["digest"] for ours in results]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    speaker = 0 if schedule == "1f1b" else 2
    assert [where in line for line in results[speaker]["said"]] == [True]
    assert [len(ours["said"]) for ours in results] == [1, 0, schedule != "1f1b", 0]


@pytest.mark.parametrize("name", [*SCHEDULES, "arrived"])
def test_all_ranks_of_all_replicas_stop_with_one_voice(found, name):
    results = found("arrived" if name == "arrived" else f"tokens {name} stop")
    assert len({ours["error"] for ours in results}) == 1
    assert "first on rank 3 (stage 1), micro-batch 2: the loss" in results[0]["error"]
    assert [ours["at"] for ours in results] == [3] * 4


def test_slices_of_a_stage_that_stop_together_name_one_cause(found):
    results = found("slice")
    name = results[3]["name"].removesuffix(".weight")
    for ours in results:
        assert f"first on rank 3 (stage 1): the gradient of module '{name}'" in ours["error"]


def test_gradients_that_should_be_alike_are_not_trusted_to_be(found):
    results = found("after reduction")
    assert len({ours["digest"] for ours in results}) == 1
    for ours in results:
        assert ours["applied"] == [True, False, True]


def test_a_grid_decides_as_one(found):
    for rank, ours in enumerate(found("grid")):
        assert ours["agreed"] == [True, False]
        assert sorted(ours["gathered"]) == [1, 2, 3]
        assert ours["gathered"] == found("grid")[0]["gathered"]
        assert ours["speaks"] == (rank == 0)
        assert ours["alone"] == (rank == 1)
