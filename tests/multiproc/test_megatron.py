# SPDX-License-Identifier: Apache-2.0
"""Megatron's steps and process grids on real ranks."""

from pathlib import Path

import pytest
import torch

MEGATRON = Path(__file__).parents[1] / "data" / "megatron" / "llama-optimizer"


@pytest.mark.world_size(2)
def test_megatrons_forward_step(launch_once):
    first, second = launch_once("megatron_step.py")
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
        assert result["documents"][0] == pytest.approx(result["documents"][1], rel=1e-6)
        assert "first on rank 1 (stage 1), micro-batch 1" in result["spoilt"]
        told = "ConfigError: wavemare.pipeline.schedule = 'pipemare': "
        assert result["asynchronous"].startswith(told)


@pytest.mark.world_size(2)
def test_a_run_of_megatron_goes_on_here(launch_once):
    """From its optimizer's state, with the next ten losses of megatron-core itself."""
    reference = torch.load(MEGATRON / "reference.pt")["next_losses"]
    assert max(reference) - min(reference) > 0.1
    for result in launch_once("megatron_step.py"):
        assert set(result["next"]) == {
            "data ZeRO 1",
            "data ZeRO 2",
            "data ZeRO 3",
            "pipeline ZeRO 1",
        }
        assert result["refused"].startswith("CheckpointError: checkpoint = ")
        for layout, (place, losses) in result["next"].items():
            assert place == [8, 64]  # steps and samples of Megatron
            assert losses == pytest.approx(reference, rel=1e-5), layout


@pytest.mark.world_size(4)
def test_an_mpu_in_every_dialect(launch_once):
    results = launch_once("megatron_mpu.py", ranks=4)
    digests = set()
    for result in results:
        for zero_stage in ("zero_0", "zero_1"):
            assert len({run["digest"] for run in result[zero_stage].values()}) == 1
            assert {run["data_ranks"] for run in result[zero_stage].values()} == {2}
        digests.add(result["zero_0"]["ours"]["digest"])
        assert result["plain"]["data_ranks"] == 4
        assert result["stage"][0] == result["stage"][1]
        assert result["replica"][0] == result["replica"][1]
        assert "by the pipeline" in result["refused"]
        if "core" in result:
            assert result["core"]["digest"] == result["zero_0"]["ours"]["digest"]
    assert len(digests) == 1  # replicas and tensor neighbours alike
