# SPDX-License-Identifier: Apache-2.0
"""Waves are decided on by the plan that would run, with its budget of activations."""

from types import SimpleNamespace

import pytest
import torch

from wavemare.engine import wavelet
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
    monkeypatch.setattr(wavelet.dist, "get_rank", lambda: 1)
    # With 104 the second wave may not begin before the first is done: nothing hides.
    saved = (60, 40, 2, 1, 1)
    waves = SimpleNamespace(
        _steps=wavelet._PROBE_WARMUPS + wavelet._PROBE_STEPS + 1,
        _shape={"pair_order": "bf", "saved_bytes": saved, "budget": budget, "num_segments": 5},
        _engine=SimpleNamespace(gradient_accumulation_steps=lambda: 8),
        _protocol=SimpleNamespace(hooks=lambda: None),
        _make_executor=lambda hooks: "executor",
        _paired=None,
        _probe=probe,
    )
    wavelet.Wavelet._watch(waves, probe)
    assert (waves._paired, waves._probe, waves._executor) == (on, None, "executor")
