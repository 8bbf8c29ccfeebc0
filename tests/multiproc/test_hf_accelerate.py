# SPDX-License-Identifier: Apache-2.0
"""``wavemare.accelerate``, and the line for scripts that keep importing transformers' Trainer."""

import pytest


@pytest.fixture
def results(launch_once):
    return launch_once("hf_accelerate.py")


@pytest.mark.world_size(2)
def test_prepare_builds_our_engine_that_trains_as_accelerates(results):
    for result in results:
        stock, ours = result["stock"], result["ours"]
        assert result["told"] == ours  # of CPUs, by cpu=True
        assert stock["class"].startswith("deepspeed.")
        assert ours["class"] == "wavemare.engine.data_parallel.Engine"
        assert ours["losses"] == stock["losses"]
        assert ours["gathered"] == stock["gathered"] == [4, 4, 4, 3]


def test_the_section_reaches_the_engine_in_spite_of_auto(results):
    for result in results:
        assert result["sparse"]["sparse"]
        assert result["sparse"]["losses"] == pytest.approx(result["stock"]["losses"], rel=1e-5)


def test_each_plugin_brings_its_own_section(results):
    for result in results:
        assert result["plugins"] == [[True, False, True, False], [False, True, False, True]]
        assert result["unlike plugins"].startswith("ConfigError: wavemare = ")


def test_ranks_that_share_a_model_read_and_count_batches_once(results):
    for result in results:
        assert result["tensor"]["gathered"] == [4, 4, 4, 3]
        assert result["ours"]["whole"] is True
        assert result["tensor"]["losses"] == results[0]["tensor"]["losses"]
        # Of the first step; later ones weigh the last, short batch in another way.
        assert result["tensor"]["losses"][:3] == pytest.approx(
            result["stock"]["losses"][:3], rel=1e-4
        )


def test_the_first_rank_gets_the_whole_of_a_split_model(results):
    assert [result["tensor"]["whole"] for result in results] == [True, None]


def test_ranks_that_share_a_model_draw_alike_where_nobody_seeds(results):
    first, second = (result["shared"] for result in results)
    assert first["read"] == second["read"]
    assert first["after"] == second["after"]
    for *epochs, skipped in first["read"].values():
        for epoch in epochs:
            assert sorted(i for batch in epoch for i in batch["index"]) == list(range(10))
        assert epochs[0] != epochs[1]
        assert len(skipped) == 2
    assert "hold one model, and read different batches" in first["unseeded"]
    assert first["unseeded"] == second["unseeded"]


def test_ranks_that_share_a_model_count_once(results):
    for result in (found["shared"] for found in results):
        assert result["ranks"] == [[0, 1], 1]
        assert result["part"] == ["a", "b", "c"]
        assert result["reduced"] == [1.0] * 9
        assert result["triggers"] == [True, False]  # one of the two has set it
        assert result["gathered"] == result["objects"] == ["name"]
        assert result["object"]  # as in one process: the Trainer concatenates what it gets
        assert result["tensors"] == result["padded"] == [1.0]
        assert result["rate"] == [0.5]


def test_a_norm_that_the_engine_does_not_clip_to_is_refused(results):
    for result in results:
        said = list(result["shared"]["clips"].values())
        assert said[0] == "accepted"
        assert all("ConfigError: gradient_clipping = 1.0" in one for one in said[1:])


def test_a_loop_that_changes_gradients_after_the_step_is_refused_or_told(results):
    for rank, result in enumerate(results):
        told = int(rank == 0)  # once
        assert result["clipped"] == {
            "norm": ["accepted", 0],
            "value": ["ConfigError: clip_grad_value_", 0],
            "torch's": ["accepted", told],
            "weights": ["accepted", 0],
        }


def test_a_loop_that_steps_elsewhere_than_its_engine_is_refused(results):
    for result in results:
        steps, by_hand, by_two_engines, alone = result["unlike steps"]
        assert steps == "accepted"
        assert by_hand.startswith("ConfigError: gradient_accumulation_steps = 1")
        assert by_two_engines.startswith("ConfigError: prepare = '2 engines'")
        assert alone.startswith("ConfigError: loss = 'loss.backward()'")


def test_a_model_that_has_an_engine_is_refused_and_the_one_inside_gets_another(results):
    for result in results:
        for again in result["again"]:
            assert all(one.startswith("ModelError: model = ") for one in again["told"])
            first, second, third = again["losses"]
            assert third < second < first


def test_what_trains_whole_steps_is_refused_with_its_key(results):
    for result in results:
        assert "wavemare.pipeline.stages" in result["pipeline"]
        assert "wavemare.pipeline.stages" in result["told staged"]
        assert "wavemare.wavelet.mode" in result["waves"]
        assert "wavemare.hf.Trainer" in result["waves"]


def test_the_patch_makes_transformers_trainer_ours(results):
    assert len(results[0]["patched"]) == 5
    assert all(results[0]["patched"].values())


def test_a_state_that_knows_of_one_process_is_refused_with_the_lines_that_help(results):
    for result in results:
        assert "for 1 of 2 processes" in result["late"]
        assert (
            "'from accelerate import PartialState' and 'PartialState(cpu=True)'" in result["late"]
        )
