# SPDX-License-Identifier: Apache-2.0
"""Cuts and shares of a pipeline by what each layer takes on each rank."""

import numpy as np
import pytest

from wavemare.parallel.balance import balance_stages

BATCH = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
}


@pytest.mark.parametrize(
    ("slow", "cuts", "shares"),
    [([], (0, 4, 8), (4, 4)), ([0, 1], (0, 2, 8), (4, 4)), ([0, 2], (0, 4, 8), (2, 6))],
    ids=["alike", "a slow stage", "a slow replica"],
)
def test_what_is_three_times_as_slow_gets_a_third(slow, cuts, shares):
    table = np.ones((4, 8))  # of rank stage * 2 + replica, eight layers of 1 s
    table[slow] *= 3
    plan = balance_stages(table, BATCH, stages=2)
    assert (plan.cuts, plan.shares) == (cuts, shares)
    slowest = max(plan.predicted.stage_s)  # 1F1B passes both stages, PipeMare never drains
    whole = balance_stages(table, BATCH, stages=2, schedule="pipemare").predicted.step_s
    assert whole == pytest.approx(4 * slowest)
    assert plan.predicted.step_s > whole
