# SPDX-License-Identifier: Apache-2.0
"""Options of torch and DeepSpeed in our engines, beside the same training without them."""

import json

import pytest
import torch

KINDS = ["zero", "stages", "split"]


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_train_alike_and_are_compiled_once(launch_once, kind):
    """The program fails where a step after the second one compiles."""
    parts = json.dumps([["compiled", each] for each in KINDS])
    for results in launch_once("engine_options.py", parts):
        expected, got, gradients, graphs = results[f"compiled {kind}"]
        assert got == pytest.approx(expected, rel=1e-6)
        assert gradients < 1e-6
        assert graphs > 0


@pytest.mark.world_size(2)
def test_ulysses_trains_as_one_process(launch_once):
    for results in launch_once("engine_options.py", '[["ulysses", null]]'):
        result = results["ulysses None"]
        assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-6)
        assert result["gradients"] < 1e-6
        assert "shift_labels = None" in result["unshared"]
        assert "zero_optimization.stage = 1" in result["refused"]


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_losses_of_a_split_model_in_bf16_are_the_whole_ones(launch_once):
    for results in launch_once("engine_options.py", '[["half", 50]]'):
        split, whole = results["half 50"]
        assert split == pytest.approx(whole, rel=2e-2)
        assert split[-1] < 0.8 * split[0]


@pytest.mark.world_size(2)
def test_weights_of_no_dimension_train_as_in_one_process(launch_once):
    stages = [0, 1, 2]
    parts = json.dumps([["scalars", stage] for stage in [*stages, 3]])
    for results in launch_once("engine_options.py", parts):
        for stage in stages:
            found, expected = results[f"scalars {stage}"]
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6), stage
        assert results["scalars 3"].startswith("ModelError: scale = ")


@pytest.mark.world_size(2)
def test_weights_of_float64_need_zero(launch_once):
    parts = json.dumps([["doubles", stage] for stage in (0, 1, 2)])
    for results in launch_once("engine_options.py", parts):
        assert results["doubles 0"]["double"].startswith("ModelError: scale = 'torch.float64': ")
        assert results["doubles 0"]["float"] == "accepted"
        for stage in (1, 2):
            assert results[f"doubles {stage}"] == {"double": "accepted", "float": "accepted"}


@pytest.mark.world_size(2)
def test_a_model_without_an_optimizer_is_evaluated_without_zero(launch_once):
    parts = json.dumps([["evaluated", stage] for stage in (0, 1, 2)])
    for results in launch_once("engine_options.py", parts):
        assert results["evaluated 0"] == "accepted"
        for stage in (1, 2):
            said = f"ConfigError: zero_optimization.stage = {stage}: "
            assert results[f"evaluated {stage}"].startswith(said)
