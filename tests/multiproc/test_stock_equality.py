# SPDX-License-Identifier: Apache-2.0
"""Without a "wavemare" section, training is stock DeepSpeed's, bit for bit."""

import pytest

CASES = ["defaults", "0", "1", "2", "3", "bf16 0", "bf16 1", "bf16 2"]
CASES += ["pipeline", "pipeline 1", "pipeline bf16"]
GUARDED = [f"guarded {case}" for case in CASES if case not in ("defaults", "pipeline")]
"""Where stock DeepSpeed clips by the right norm, which the guard looks at, too."""


@pytest.mark.world_size(2)
@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_training_equals_stock_deepspeed_bitwise(launch_once, steps):
    for results in launch_once("stock_equality.py", steps, *CASES, *GUARDED):
        assert set(results) == {*CASES, *GUARDED}
        for case, result in results.items():
            stock, ours = result["stock"], result["ours"]
            assert ours["engine"].startswith("wavemare."), case
            assert stock["engine"].startswith("deepspeed."), case
            assert len(ours["losses"]) >= steps
            assert ours["losses"] == stock["losses"], case
            assert ours["weights"] == stock["weights"], case
            assert ours["losses"][-1] != ours["losses"][0]


@pytest.mark.world_size(1)
def test_a_rank_without_others_reduces_nothing_and_keeps_the_bits(launch_once):
    cases = "0", "bf16 messages", "divided"
    (result,) = launch_once("stock_equality.py", 2, *cases, ranks=1)
    for case, both in result.items():
        assert both["ours"]["weights"] == both["stock"]["weights"], case
        stock, ours = both["stock"]["all_reduces"], both["ours"]["all_reduces"]
        assert stock > 0, case
        # bf16 messages are rounded, and others divided: these reductions change bits.
        assert ours == (0 if case == "0" else stock), case
