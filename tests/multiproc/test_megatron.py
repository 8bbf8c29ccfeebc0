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


@pytest.mark.world_size(2)
def test_megatrons_forward_step(launch):
    done = launch("megatron_step.py", ranks=2).check()
    first, second = done.result(0), done.result(1)
    both = [(a + b) / 2 for a, b in zip(first["data"], second["data"], strict=True)]
    assert both == pytest.approx(first["twin_2"], rel=1e-5)
    assert first["data"] != second["data"]
    assert first["pipeline"] == second["pipeline"] == pytest.approx(first["twin_1"], rel=1e-5)
    assert first["twin_1"][-1] < first["twin_1"][0]
    assert first["pipeline_reports"] == [[], [], [], []]
    for step, loss in zip(second["pipeline_reports"], second["pipeline"], strict=True):
        means = [total / count for total, count in (report["lm loss"] for report in step)]
        assert sum(means) / 2 == pytest.approx(loss, rel=1e-5)
    # Both stages read a batch, so both refuse.
    for result in (first, second):
        uses, packed, masked = result["refusals"]
        assert "uses the model's output (mean)" in uses
        assert "carries only input_ids" in packed
        assert "a mask for each pair of tokens" in masked
        assert result["restored"]
        assert "PipeMareEngine" in result["asynchronous"]
        assert "1f1b" in result["asynchronous"]
