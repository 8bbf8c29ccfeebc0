# SPDX-License-Identifier: Apache-2.0
"""Stages on any ranks, several on each: their checkpoints elsewhere."""

import pytest

TWO = ("universal", "uneven", "own layers")


@pytest.mark.world_size(2)
def test_a_universal_checkpoint_goes_on_to_the_bit_in_any_placement(launch_once):
    for results in launch_once("placements.py", *TWO):
        assert len(results["universal"]) == 3
        for case, found in results["universal"].items():
            assert not found.pop("damaged"), case
            whole = found.pop("whole")
            assert len(whole) == 2
            assert len(found) >= 1
            assert all(losses == whole for losses in found.values()), (case, whole, found)


@pytest.mark.world_size(2)
def test_ranks_may_have_unlike_numbers_of_stages(launch_once):
    for results in launch_once("placements.py", *TWO):
        found = results["uneven"]
        assert found["resumed"]
        assert found["losses"] == pytest.approx(found["expected"], abs=1e-5)


@pytest.mark.world_size(2)
def test_layers_of_ones_own_are_cut_by_ranks(launch_once):
    for results in launch_once("placements.py", *TWO):
        found = results["own layers"]
        # Two layers of about 1,050 weights, eight of 272: four of these join each of the two.
        by_weights, by_type, uniform, given = found["cuts"]
        assert by_weights == [0, 1, 2, 6, 10]
        assert by_type == uniform == [0, 2, 4, 7, 10]
        assert given == [0, 1, 2, 5, 10]
        assert found["refused"].startswith("ConfigError: partition_method = 'profile'")


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["four", "replicas"])
def test_four_ranks_train_to_the_bits_of_1f1b(launch_once, name):
    ranks = [results[name] for results in launch_once("placements.py", "four", "replicas", ranks=4)]
    expected = [found.pop("1f1b") for found in ranks]
    assert len(expected[0]["weights"]) > 20
    for rank, found in enumerate(ranks):
        for schedule, ours in found.items():
            assert len(ours["own"]) == 2
            for key in ("losses", "evaluation", "weights"):
                assert ours[key] == expected[rank][key], (rank, schedule, key)


@pytest.mark.world_size(1)
def test_one_rank_has_all_stages_and_takes_one_loss(launch_once):
    (results,) = launch_once("placements.py", "alone", ranks=1)
    found = results["alone"]
    assert len(found["losses"]) == 5
    assert all(losses == found["losses"]["1f1b"] for losses in found["losses"].values())
    assert found["refused"].startswith("ModelError: loss_fn = 'tuple': training takes the gradient")
