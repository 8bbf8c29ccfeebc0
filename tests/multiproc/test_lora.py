# SPDX-License-Identifier: Apache-2.0
"""LoRA models of peft on two ranks: one process's adapters, in folders and checkpoints."""

import pytest

ACTIONS = (
    *("zero3", "tensor", "1f1b", "pipemare", "resume", "refused", "calls zbv"),
    *("dora", "frozen", "frozen bf16"),
)
NIGHTLY = (
    *("calls 1f1b", "zero1", "zb-h1", "zbv", "resume without base", "memory", "trainer"),
    *("dora zb-h1", "frozen pipemare"),
)
ADAPTER = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
WHOLE = ["config.json", "generation_config.json", "model.safetensors"]


def check(found, limit):
    assert found["files"] == ADAPTER
    assert found["whole"] == WHOLE
    assert found["moved"] > 1e-3
    assert max(found["adapter"], found["logits"], found["merged"]) <= limit


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("action", "limit"),
    [("1f1b", 0), ("dora", 0), ("frozen", 1e-6), ("zero3", 1e-5), ("tensor", 1e-4)],
)
def test_trained_adapters_are_those_of_one_process(launch_once, action, limit):
    for results in launch_once("lora.py", *ACTIONS):
        check(results[action], limit)


@pytest.mark.nightly
@pytest.mark.world_size(4)
def test_layers_of_stages_may_be_split_too(launch_once):
    for results in launch_once("lora.py", "tensor in stages", ranks=4):
        check(results["tensor in stages"], 1e-4)


@pytest.mark.world_size(2)
def test_dropout_before_a_layer_split_by_columns_is_refused(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        refused = results["tensor"]["refused"]
        assert "lora_dropout': the ranks would drop different elements" in refused


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("action", "limit"), [("zb-h1", 0), ("zbv", 0), ("zero1", 1e-6), ("dora zb-h1", 1e-6)]
)
def test_so_are_those_of_other_schedules(launch_once, action, limit):
    for results in launch_once("lora.py", *NIGHTLY):
        check(results[action], limit)


@pytest.mark.world_size(2)
def test_a_stale_pipeline_learns_and_saves_what_it_learnt(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        losses = results["pipemare"]["losses"]
        assert losses[-1] < losses[0] - 0.15
        assert results["pipemare"]["saved"] < losses[-1]


@pytest.mark.world_size(2)
def test_a_checkpoint_goes_on_to_the_bit(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        assert results["resume"]["same"]


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_a_checkpoint_without_frozen_weights_does_too(launch_once):
    for results in launch_once("lora.py", *NIGHTLY):
        found = results["resume without base"]
        assert found["same"]
        assert found["bytes"] < 150_000  # 274,000 with them


def check_calls(result):
    found, expected = result["found"], result["expected"]
    for name in ("before", "disabled", "enabled", "merged", "again"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found["by the model"] == found["by the engine"]
    # Unmerging leaves the rounding of a sum and a difference in the base.
    assert found["by the model"] == pytest.approx(found["disabled"], rel=1e-6)
    assert found["disabled"] != pytest.approx(found["before"], rel=1e-4)
    assert found["active"] == expected["active"]
    first, second = found["trained"]
    assert second < first  # the adapter is trained again
    assert all(told.startswith("ModelError: ") for told in result["refused"].values())
    assert "unmerge_adapter()" in result["refused"]["merge"]


@pytest.mark.world_size(2)
def test_calls_of_peft_on_a_pipeline_do_what_they_do_in_one_process_or_are_refused(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        check_calls(results["calls zbv"])


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_so_they_do_on_a_pipeline_with_one_stage_on_each_rank(launch_once):
    for results in launch_once("lora.py", *NIGHTLY):
        check_calls(results["calls 1f1b"])


@pytest.mark.world_size(2)
def test_a_stage_without_trained_weights_goes_on_from_a_checkpoint_and_stays(launch_once):
    first, last = launch_once("lora.py", *ACTIONS)
    for results in (first, last):
        one, other = results["frozen"]["losses"]
        assert one == other
        losses = results["frozen bf16"]["losses"]
        assert losses[-1] < losses[0] - 0.002
    assert not first["frozen bf16"]["moved"]
    assert all("lora_" in name for name in last["frozen bf16"]["moved"])
    assert last["frozen bf16"]["moved"]


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_it_may_step_alone(launch_once):
    for results in launch_once("lora.py", *NIGHTLY):
        check(results["frozen pipemare"], 1e-6)  # the last stage's gradients are never stale


@pytest.mark.world_size(2)
def test_dora_in_split_layers_and_a_model_without_trained_weights_are_refused(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        assert results["refused"]["dora"].startswith("ModelError: use_dora = True: ")
        assert results["refused"]["nothing"].startswith("ConfigError: model = ")


@pytest.mark.world_size(2)
def test_adapters_that_an_engine_would_not_divide_are_refused_and_those_before_it_train(
    launch_once,
):
    for results in launch_once("lora.py", "added"):
        for layout, found in results["added"].items():
            assert len(set(found.pop("loss"))) == 2, layout
            for call, said in found.items():
                whole = layout == "zero1" and call != "train"  # as in one process
                assert said.startswith("accepted" if whole else "ModelError: "), (layout, call)


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_a_correction_keeps_copies_of_trained_weights_alone(launch_once):
    first, last = (results["memory"] for results in launch_once("lora.py", *NIGHTLY))
    for name in ("model", "lora"):
        kept = first[f"{name} ema"] - first[f"{name} off"]
        assert kept == pytest.approx(2 * first[name], rel=0.01)  # velocity and former weights
        assert last[f"{name} ema"] == pytest.approx(last[f"{name} off"], abs=1024)
    assert first["lora"] < first["model"] / 4


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_the_trainer_trains_an_adapter_in_a_pipeline(launch_once):
    for results in launch_once("lora.py", *NIGHTLY):
        found = results["trainer"]
        assert found["engine"] == "PipelineEngine"
        before, after = found["losses"]
        assert after < before - 0.1
