# SPDX-License-Identifier: Apache-2.0
"""What one rank sees alone: all that step with it decide alike, and none waits for ever."""

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
        "slice": ["split", {"pairs": False, "schedule": "pipemare"}],
        **{f"pairs {s}": ["split", {"pairs": True, "schedule": s}] for s in SCHEDULES},
    }
}


@pytest.fixture
def found(launch_cases):
    return partial(launch_cases, "guard_replicas.py", CASES)


def check_skipped(results, stages, spoken_by, where):
    for rank, ours in enumerate(results):
        assert ours["applied"] == (SKIPPED if rank // 2 in stages else ALL)
        assert ours["finite"]
        said = [line for line in ours["said"] if f"first on {where}" in line]
        assert len(said) == len(ours["said"]) == (rank in spoken_by)
    digests = [ours["digest"] for ours in results]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_all_replicas_skip_the_step_of_an_activation_that_the_next_stage_bears(found):
    where = "rank 1 (stage 0), micro-batch 2: the activation of module '2'"
    check_skipped(found("mask pipemare"), [0], [0], where)
    check_skipped(found("mask 1f1b"), [0, 1], [0], where)


@pytest.mark.parametrize("schedule", ["1f1b", "pipemare"])
def test_a_second_pass_of_one_rank_counts_no_tokens_with_others(found, schedule):
    # Backward it comes to the first stage, whose replicas know it from the reduction or by arrival.
    where = "rank 3 (stage 1), micro-batch 2: the activation of module '5'"
    results = found(f"tokens {schedule} skip")
    if schedule == "1f1b":
        check_skipped(results, [0, 1], [0], where)
    else:
        for ours in results:
            assert ours["applied"] == SKIPPED
            assert ours["finite"]
        assert results[0]["digest"] == results[1]["digest"]
        assert results[2]["digest"] == results[3]["digest"]
        assert [where in line for line in results[2]["said"]] == [True]
    for ours in found(f"tokens {schedule} stop")[2:]:
        assert where in ours["error"]
        assert ours["at"] == 2


def test_replicas_name_the_one_of_them_to_which_a_wrong_number_came(found):
    results = found("arrived")
    assert [ours["at"] for ours in results] == [2] * 4
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert "rank 1 (stage 0), micro-batch 2: the activation of module '2'" in results[0]["error"]
    told = "rank 3 (stage 1), micro-batch 2: the activation that came from a neighbouring stage"
    assert told in results[2]["error"]


def test_slices_of_a_stage_that_stop_together_name_one_cause(found):
    results = found("slice")
    name = results[3]["name"]
    for ours in results[2:]:
        assert (
            f"first on rank 3 (stage 1): the gradient of module '{name.removesuffix('.weight')}'"
            in (ours["error"])
        )
    for ours in results[:2]:
        assert "first on rank 0 (stage 0): the gradient" in ours["error"]
        assert "of which it knows the norm alone" in ours["error"]


@pytest.mark.parametrize("schedule", ["1f1b", "pipemare"])
def test_with_passes_in_pairs_gradients_alone_are_looked_at(found, schedule):
    for ours in found(f"pairs {schedule}"):
        assert "in optimizer step 1 a number is not finite" in ours["error"]


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
