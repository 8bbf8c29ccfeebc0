# SPDX-License-Identifier: Apache-2.0
"""Options of torch and DeepSpeed in our engines, beside the same training without them."""

import json

import pytest

KINDS = ["zero", "stages", "split"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_train_alike_and_are_compiled_once(launch_once, kind):
    """The program fails where a step after the second one compiles."""
    parts = [["compiled", each] for each in KINDS]
    for results in launch_once("engine_options.py", json.dumps(parts)):
        result = results[f"compiled {kind}"]
        assert result["losses"] < 1e-5
        assert result["gradients"] < 1e-6
        assert result["moved"] > 1e-2
        assert result["blocks"] == (1 if kind == "stages" else 2)
        assert 0 < result["graphs"]


@pytest.mark.world_size(2)
def test_ulysses_trains_as_one_process(launch_once):
    for rank, results in enumerate(launch_once("engine_options.py", '[["ulysses", null]]')):
        result = results["ulysses None"]
        for key in ("losses", "evaluated"):
            assert result[key][0] == pytest.approx(result[key][1], rel=1e-6)
        assert result["gradients"] < 1e-6
        assert result["moved"] > 1e-2
        assert result["data_ranks"] == [rank, 2]
        assert "shift_labels = None" in result["unshared"]
        assert "zero_optimization.stage = 1" in result["refused"]


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_losses_of_a_split_model_in_bf16_are_the_whole_ones(launch_once):
    for results in launch_once("engine_options.py", '[["half", 50]]'):
        split, whole = results["half 50"]
        assert split == pytest.approx(whole, rel=2e-2)
        assert split[-1] < 0.8 * split[0]
