# SPDX-License-Identifier: Apache-2.0
"""What reductions of replicas take: by closed forms, over links that several of them share."""

from dataclasses import replace

import pytest

from wavemare.parallel.planner.cluster import Cluster, Device, Link
from wavemare.parallel.planner.model import model_costs
from wavemare.parallel.planner.predict import (
    Candidate,
    Scene,
    Settings,
    Variant,
    optimizer_s,
    reduction_s,
)

SLOW = Link(0.0, 1e6)
DEVICE = Device(type="d", tflops=10, memory_gib=64, memory_gb_s=1e9)
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 100,
}


@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 1 + 3), (3, 3 * 3 * 0.5)])
def test_only_gathers_of_zero_3_are_hidden(zero, passes):
    variant = Variant(stages=1, tensor_parallel=1, data_parallel=4, zero_stage=zero)
    found = reduction_s(SLOW, 8e6, variant, micro_steps=3, layers=5)
    # A pass of a ring of 4: 3 messages of a quarter.
    assert found == pytest.approx(passes * 3 * 2e6 / 1e6)
    single = replace(variant, data_parallel=1)
    nowhere = Link(float("inf"), 1.0)
    assert reduction_s(nowhere, 8e6, single, micro_steps=3, layers=5) == 0


@pytest.mark.parametrize(
    ("nodes", "degrees", "units", "groups"),
    [
        # One group over both nodes; two of them, each of half the weights; two stages' groups.
        ("aabb", (1, 1, 4), (((0,), (1,), (2,), (3,)),), 1),
        ("aabb", (1, 2, 2), (((0, 1), (2, 3)),), 2),
        ("aabb", (2, 1, 2), (((0,), (2,)), ((1,), (3,))), 2),
        # Replicas of a stage on one node do not use the link between nodes.
        ("aabb", (2, 1, 2), (((0,), (1,)), ((2,), (3,))), 0),
        ("aaab", (2, 1, 2), (((0,), (3,)), ((1,), (2,))), 1),
    ],
)
def test_groups_that_reduce_between_nodes_share_the_link(nodes, degrees, units, groups):
    stages, splits, replicas = degrees
    devices = tuple(replace(DEVICE, node=name) for name in nodes)
    cluster = Cluster(devices=devices, within=Link(0.0, 1e12), between=SLOW)
    scene = Scene(model_costs(GPT2, 64), cluster, Settings(global_batch=8))
    variant = Variant(stages=stages, tensor_parallel=splits, data_parallel=replicas)
    count = len(scene.costs.layers)
    bounds = (0, count // 2, count) if stages > 1 else (0, count)
    layout = Candidate(
        variant=variant,
        units=units,
        bounds=bounds,
        shares=(8 // replicas,) * replicas,
        micro_steps=1,
    )
    ends = []
    for stage in range(stages):
        layers = scene.costs.layers[bounds[stage] : bounds[stage + 1]]
        parameters = sum(layer.parameters for layer in layers) / splits
        is_within = len({nodes[unit[0]] for unit in units[stage]}) == 1
        link = Link(0.0, 1e12 if is_within else 1e6 / groups)
        ring_s = 2 * (replicas - 1) * 4 * parameters / replicas / link.bytes_s
        ends.append(ring_s + optimizer_s(DEVICE, parameters, variant))
    predicted = scene.predict(layout)
    assert predicted.step_s - max(predicted.rank_s) == pytest.approx(max(ends))
