# SPDX-License-Identifier: Apache-2.0
"""LoRA models of peft on two ranks: one process's adapters, in folders and checkpoints."""

import pytest

ACTIONS = (
    "zero1",
    "zero3",
    "1f1b",
    "zb-h1",
    "pipemare",
    "resume",
    "resume without base",
    "refused",
)
MORE = ("memory", "trainer")
ADAPTER = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
WHOLE = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("action", "limit"), [("1f1b", 0), ("zb-h1", 0), ("zero1", 1e-6), ("zero3", 1e-5)]
)
def test_trained_adapters_are_those_of_one_process(launch_once, action, limit):
    for results in launch_once("lora.py", *ACTIONS):
        found = results[action]
        assert found["files"] == ADAPTER
        assert found["whole"] == WHOLE
        assert found["moved"] > 1e-3
        assert found["adapter"] <= limit
        assert found["logits"] <= limit
        assert found["merged"] <= limit


@pytest.mark.world_size(2)
def test_a_stale_pipeline_learns_and_saves_what_it_learnt(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        losses = results["pipemare"]["losses"]
        assert losses[-1] < losses[0] - 0.15
        assert results["pipemare"]["saved"] < losses[-1]


@pytest.mark.world_size(2)
def test_a_checkpoint_goes_on_to_the_bit_also_without_frozen_weights(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        whole, adapters = results["resume"], results["resume without base"]
        assert whole["same"]
        assert adapters["same"]
        assert adapters["bytes"] < whole["bytes"] / 2


@pytest.mark.world_size(2)
def test_a_stage_without_trained_weights_is_refused_on_all_ranks(launch_once):
    for results in launch_once("lora.py", *ACTIONS):
        refused = results["refused"]
        assert refused.startswith("ConfigError: wavemare.pipeline.partition = [0, 3]: all weights")


@pytest.mark.world_size(2)
def test_a_correction_keeps_copies_of_trained_weights_alone(launch_once):
    first, last = (results["memory"] for results in launch_once("lora.py", *MORE))
    for name in ("model", "lora"):
        kept = first[f"{name} ema"] - first[f"{name} off"]
        assert kept == pytest.approx(2 * first[name], rel=0.01)  # velocity and former weights
        assert last[f"{name} ema"] == pytest.approx(last[f"{name} off"], abs=1024)
    assert first["lora"] < first["model"] / 4


@pytest.mark.world_size(2)
def test_the_trainer_trains_an_adapter_in_a_pipeline(launch_once):
    for results in launch_once("lora.py", *MORE):
        found = results["trainer"]
        assert found["engine"] == "PipelineEngine"
        before, after = found["losses"]
        assert after < before - 0.1
