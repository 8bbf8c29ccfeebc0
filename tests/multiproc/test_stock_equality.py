# SPDX-License-Identifier: Apache-2.0
"""Without a "wavemare" section, training is stock DeepSpeed's, bit for bit."""

import pytest

CASES = ["defaults", "0", "1", "2", "3", "pipeline"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_training_equals_stock_deepspeed_bitwise(launch_once, steps):
    for results in launch_once("stock_equality.py", steps, *CASES):
        assert set(results) == set(CASES)
        for case, result in results.items():
            stock, ours = result["stock"], result["ours"]
            assert ours["engine"].startswith("wavemare."), case
            assert stock["engine"].startswith("deepspeed."), case
            assert len(ours["losses"]) >= steps
            assert ours["losses"] == stock["losses"], case
            assert ours["weights"] == stock["weights"], case
            assert ours["losses"][-1] != ours["losses"][0]
