"""Megatron's checkpoints, steps and process grids on real ranks."""

import pytest


@pytest.mark.world_size(2)
def test_a_converted_checkpoint_in_a_pipeline_engine(launch):
    done = launch("megatron_pipeline.py", ranks=2).check()
    first, second = done.result(0), done.result(1)
    assert first["loaded"]
    assert first["changed"]
    assert first["equal"]
    assert first["loss"] == second["loss"]
