# SPDX-License-Identifier: Apache-2.0
"""The section ``wavemare.wavelet``: what it refuses, and how it says so."""

import pytest

from wavemare.engine.config import check_config
from wavemare.errors import ConfigError

BASE = {"train_micro_batch_size_per_gpu": 1}


def check(wavelet, **config):
    section = {"wavelet": wavelet, **config.pop("wavemare", {})}
    return check_config({**BASE, **config, "wavemare": section}, world_size=2)


@pytest.mark.parametrize("mode", ["auto", "sync"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_synchronous_modes_go_with_every_zero_stage(mode, zero):
    assert check({"mode": mode}, zero_optimization={"stage": zero}).wavelet.mode == mode


def test_waves_are_off_by_default():
    assert check({}).wavelet.mode == "off"


@pytest.mark.parametrize(
    ("wavelet", "config", "key", "reason"),
    [
        ({"mode": "snyc"}, {}, "wavemare.wavelet.mode", "Did you mean 'sync'?"),
        ({"mod": "sync"}, {}, "wavemare.wavelet.mod", "does not exist"),
        ({"budget": 1.5}, {}, "wavemare.wavelet.budget", "no effect"),
        ({"mode": "sync", "budget": 0.9}, {}, "wavemare.wavelet.budget", "greater than"),
        ({"mode": "sync", "pair_order": "bb"}, {}, "wavemare.wavelet.pair_order", "'fb'"),
        ({"mode": "sync", "streams": 3}, {}, "wavemare.wavelet.streams", "1 or 2"),
        ({"mode": "sync", "warmup_steps": 3}, {}, "wavemare.wavelet.warmup_steps", "no effect"),
        (
            {"mode": "async"},
            {"zero_optimization": {"stage": 1}},
            "zero_optimization.stage",
            "two versions",
        ),
        ({"mode": "async"}, {"bf16": {"enabled": True}}, "bf16.enabled", "in fp32"),
        ({"mode": "replica"}, {"fp16": {"enabled": True}}, "fp16.enabled", "in fp32"),
        (
            {"mode": "replica"},
            {"optimizer": {"type": "AdamW"}},
            "optimizer.type",
            "drift apart",
        ),
        (
            {"mode": "sync"},
            {"wavemare": {"pipeline": {"stages": 2}}},
            "wavemare.wavelet.mode",
            "in turns already",
        ),
        (
            {"mode": "sync"},
            {"flops_profiler": {"enabled": True}},
            "flops_profiler.enabled",
            "whole forward passes",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(wavelet, config, key, reason):
    with pytest.raises(ConfigError) as caught:
        check(wavelet, **config)
    assert caught.value.key == key
    assert reason in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["SGD", "sgd"])
def test_replicas_take_steps_that_are_linear(kind):
    check({"mode": "replica"}, optimizer={"type": kind, "params": {"momentum": 0.9}})
