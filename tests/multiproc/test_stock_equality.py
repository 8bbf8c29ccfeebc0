# SPDX-License-Identifier: Apache-2.0
"""Without a "wavemare" section, training is stock DeepSpeed's, bit for bit."""

import pytest

CASES = ["defaults", "0", "1", "2", "3", "pipeline"]


@pytest.mark.world_size(2)
def test_twenty_steps_equal_stock_deepspeed_bitwise(launch):
    finished = launch("stock_equality.py", *CASES).check()
    for rank in range(2):
        results = finished.result(rank)
        assert set(results) == set(CASES)
        for case, result in results.items():
            stock, ours = result["stock"], result["ours"]
            assert ours["engine"].startswith("wavemare."), case
            assert stock["engine"].startswith("deepspeed."), case
            assert len(ours["losses"]) >= 20
            assert ours["losses"] == stock["losses"], case
            assert ours["weights"] == stock["weights"], case
            assert ours["losses"][-1] != ours["losses"][0]
