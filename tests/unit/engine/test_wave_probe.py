# SPDX-License-Identifier: Apache-2.0
"""Waves are decided on by the plan that would run, with its budget of activations."""

import pytest
import torch

from wavemare.engine.wave_probe import WaveProbe
from wavemare.pipeline.simulate import Costs

SEGMENTS = 5
COSTS = Costs(
    forward_s=(1.0,) * SEGMENTS,
    backward_s=(2.0,) * SEGMENTS,
    sum_output_s=(*(0.4,) * 4, 0.0),
    sum_gradient_s=(*(0.8,) * 4, 0.0),
)


@pytest.mark.parametrize(("budget", "on"), [(None, True), (124, True), (104, False)])
def test_the_decision_is_about_the_plan_that_would_run(monkeypatch, budget, on):
    probe = WaveProbe(torch.device("cpu"), SEGMENTS)
    monkeypatch.setattr(probe, "costs", lambda: COSTS)
    # With 104 the second wave may not begin before the first is done: nothing hides.
    saved = (60, 40, 2, 1, 1)
    assert probe.decide(8, pair_order="bf", saved_bytes=saved, budget=budget).on == on
