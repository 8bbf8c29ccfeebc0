# SPDX-License-Identifier: Apache-2.0
"""Modes ``async`` and ``replica`` of waves: loops of the same rule, step for step."""

import pytest

BITWISE = ("sgd, 1", "sgd, 3", "adamw, 2", "sparse, 2", "back at once, 2")


@pytest.fixture
def results(launch_once):
    return launch_once("wave_async.py")


@pytest.mark.parametrize("name", BITWISE)
def test_the_delay_is_one_step_and_nothing_else_differs(results, name):
    for result in results:
        assert result[name]["losses"] == result[name]["expected"]
        assert result[name]["weights"] == 0.0
        assert result[name]["steps"] == len(result[name]["losses"])


def test_clipping_bounds_the_delayed_gradient(results):
    for result in results:
        assert result["clipped, 2"]["weights"] <= 1e-5  # DeepSpeed's formula adds another epsilon
        assert result["clipped, 2"]["losses"] != result["sparse, 2"]["losses"]


def test_warmup_steps_are_synchronous(results):
    for result in results:
        assert result["warmup"]["losses"] == result["warmup"]["expected"]
        assert result["warmup"]["next"][0] == result["warmup"]["next"][1]


def test_a_split_model_is_a_step_behind_like_a_whole_one(results):
    for result in results:
        found = result["split"]
        assert found["losses"] == pytest.approx(found["expected"], abs=1e-5)
        assert found["losses"] != pytest.approx(found["other"], abs=1e-3)


@pytest.mark.parametrize("mode", ["async", "replica"])
def test_saving_changes_nothing_and_a_resume_goes_on_bitwise(results, mode):
    for result in results:
        whole, going_on, resumed = result[f"resume {mode}"]["losses"]
        assert whole == going_on == resumed
        assert result[f"resume {mode}"]["weights"] == [0.0, 0.0]
        assert result[f"resume {mode}"]["drained"] == 0.0
        assert len(set(result[f"resume {mode}"]["steps"])) == 1


def test_replicas_begin_with_the_weights_and_momentum_that_are_there(results):
    for result in results:
        found = result["late replicas"]
        assert found["losses"] == [found["expected"]] * 2
        assert found["bare"] == found["expected bare"] != found["expected"]


@pytest.mark.parametrize("mode", ["async", "replica"])
def test_a_load_drops_what_was_under_way(results, mode):
    for result in results:
        found = result[f"back {mode}"]
        assert found["losses"] == [found["expected"]] * 3


def test_the_number_of_micro_batches_may_change(results):
    for result in results:
        found = result["resized"]
        assert found["losses"] == found["expected"]
        assert found["weights"] == 0.0


def test_a_loop_of_ones_own_goes_on_after_waves(results):
    for result in results:
        assert "drain()" in result["manual"]["refused"]
        assert result["manual"]["steps"] == 3
        assert result["manual"]["weights"] == 0.0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replicas_stay_half_a_step_apart(results, micro_batches):
    """``w0 - w1 = -(rate / 2) (g_first - g_last)`` in fp64: the sums telescope."""
    for result in results:
        found = result[f"replica, {micro_batches}"]
        assert found["losses"] == found["expected"]
        assert max(found["weights"]) < 1e-15
        assert found["gap"] < 1e-12 < found["distance"]
