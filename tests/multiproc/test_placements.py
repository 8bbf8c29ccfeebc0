# SPDX-License-Identifier: Apache-2.0
"""Stages on any ranks, several on each: their checkpoints elsewhere."""

import pytest

TWO = ("universal", "uneven", "own layers", "in bytes")


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
    last = {"four": 7, "replicas": 3}[name]
    for rank, found in enumerate(ranks):
        for schedule, ours in found.items():
            assert len(ours["own"]) == 2
            assert ours["active"] == [[stage, stage == last] for stage in ours["own"]]
            for key in ("losses", "evaluation", "weights"):
                assert ours[key] == expected[rank][key], (rank, schedule, key)


@pytest.mark.world_size(1)
def test_one_rank_has_all_stages_and_takes_one_loss(launch_once):
    (results,) = launch_once("placements.py", "alone", ranks=1)
    found = results["alone"]
    assert len(found["losses"]) == 5
    assert all(losses == found["losses"]["1f1b"] for losses in found["losses"].values())
    assert found["refused"].startswith("ModelError: loss_fn = 'tuple': training takes the gradient")


@pytest.mark.world_size(2)
def test_a_limit_in_bytes_becomes_one_in_micro_batches(launch_once):
    first, second = (results["in bytes"] for results in launch_once("placements.py", *TWO))
    assert first == second
    refused = first["refused"]
    assert refused.startswith("ConfigError: wavemare.pipeline.memory_limit = '0.000001GB'")
    least = 1e9 * float(refused.partition("Give ")[2].partition("GB or more")[0])
    assert 0.45 < least / first["whole"] < 0.55  # each rank has half of the layers
    for limit, most in (("least", 1.0), ("1GB", 2.0)):
        found = first[limit]
        assert found["same"], limit
        before, after = found["peaks"]
        assert before == [1.0, 1.0]
        assert max(after) == most, limit
