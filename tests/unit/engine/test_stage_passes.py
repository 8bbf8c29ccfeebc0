# SPDX-License-Identifier: Apache-2.0
"""Pairs of passes: what they are refused for."""

from types import SimpleNamespace

import pytest

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
