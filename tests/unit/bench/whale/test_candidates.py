# SPDX-License-Identifier: Apache-2.0
"""The best plan for all axes of four ranks, of which the planner's choice is the first."""

import pytest

from wavemare.bench.whale.candidates import plans_by_axes
from wavemare.parallel.planner.api import plan
from wavemare.parallel.planner.chains import model_costs
from wavemare.parallel.planner.cluster import Cluster, Device, Link
from wavemare.parallel.planner.settings import Settings

ALL = {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}


def costs():
    sizes = {"n_embd": 256, "n_layer": 8, "n_head": 4, "n_positions": 128, "vocab_size": 32}
    return model_costs({"model_type": "gpt2", **sizes}, 128, head="GPT2LMHeadModel")


def cluster(*speeds, nodes="0000"):
    devices = tuple(
        Device(type=f"x{speed:g}", tflops=speed / 100, memory_gib=4, memory_gb_s=4, node=node)
        for speed, node in zip(speeds, nodes, strict=True)
    )
    return Cluster(devices=devices, within=Link(1e-4, 1e9), between=Link(1e-3, 25e6))


@pytest.mark.parametrize(
    ("devices", "legal"),
    [
        (cluster(1, 1, 1, 1), ALL),
        # Ranks that share a layer are alike, and in one node.
        (cluster(2, 2, 1, 1), ALL - {(1, 4, 1)}),
        (cluster(1, 1, 1, 1, nodes="0011"), ALL - {(1, 4, 1)}),
    ],
)
def test_there_is_a_plan_for_all_legal_axes_and_the_first_is_the_planners(devices, legal):
    options = {"zero_stages": (0, 1), "waves": False, "recompute": False}
    plans = plans_by_axes(costs(), devices, Settings(global_batch=16, **options))
    assert set(plans) == legal
    steps = [found.predicted.step_s for found in plans.values() if found.predicted]
    assert steps == sorted(steps)
    for (stages, splits, replicas), found in plans.items():
        axes = found.stages, found.tensor_parallel, found.data_parallel
        assert axes == (stages, splits, replicas)
        assert sum(found.shares) * found.micro_steps == 16
    searched = plan(costs(), devices, global_batch=16, sequence_length=128, **options).best
    assert searched.predicted is not None
    assert searched.predicted.step_s == pytest.approx(steps[0])
