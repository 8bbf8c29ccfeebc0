# SPDX-License-Identifier: Apache-2.0
"""Pairs of passes: what they are refused for."""

from types import SimpleNamespace

import pytest

from wavemare.engine.config import check_config
from wavemare.engine.stage_passes import StagePasses, check_pair_passes
from wavemare.errors import ConfigError

KEY = "wavemare.pipeline.pair_passes"


def test_without_sums_over_ranks_there_is_nothing_to_hide():
    grid = SimpleNamespace(get_slice_parallel_world_size=lambda: 1)
    whole = SimpleNamespace(mpu=lambda: grid, stage_segments=None)
    for model in (object(), whole):
        with pytest.raises(ConfigError, match="no sums over ranks") as caught:
            check_pair_passes(model)
        assert caught.value.key == KEY
    grid.get_slice_parallel_world_size = lambda: 2
    check_pair_passes(whole)


def test_activation_checkpoints_are_refused():
    engine = SimpleNamespace(module=SimpleNamespace(activation_checkpoint_interval=1))
    with pytest.raises(ConfigError, match="no checkpoints") as caught:
        StagePasses(engine)
    assert caught.value.key == KEY


def check(world_size=4, **config):
    section = {"pipeline": {"stages": 2}, "tensor_parallel": {"size": 2}}
    return check_config({"wavemare": section, **config}, world_size=world_size)


def test_stages_may_be_split():
    assert check().model_ranks == 4
    check(bf16={"enabled": True})
    check(world_size=8, zero_optimization={"stage": 1})


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        ({"world_size": 6}, "wavemare.tensor_parallel.size", "times the 2 pipeline stages"),
        ({"pipeline": {"pipe_partitioned": True}}, "pipeline.pipe_partitioned", "whole tensors"),
        ({"pipeline": {"grad_partitioned": True}}, "pipeline.grad_partitioned", "whole tensors"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "one rank alone"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "pipeline"),
    ],
)
def test_what_split_stages_do_not_go_with(config, key, reason):
    with pytest.raises(ConfigError) as caught:
        check(**config)
    assert caught.value.key == key
    assert reason in str(caught.value)
    assert caught.value.remedy
