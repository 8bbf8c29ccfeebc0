# SPDX-License-Identifier: Apache-2.0
"""What reductions of replicas take: by closed forms, over links that several of them share."""

import random
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
from wavemare.parallel.planner.timing import Hop, estimated_ends, pipeline_ends
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.orders import one_f_one_b
from wavemare.pipeline.plan.plan import Kind

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
    replicas_end = [
        pipeline_ends(tuple(scene.stage_times(layout, r)), scene.hops(layout, r), 1)
        for r in range(replicas)
    ]
    begins = [max(row[stage] for row in replicas_end) for stage in range(stages)]
    if stages > 1:  # the tied weights are summed first
        tied = scene.costs.layers[-1].tied_parameters
        nodes_of_ends = [[nodes[units[stage][r][0]] for stage in (0, -1)] for r in range(replicas)]
        sums = [4 * tied / (1e12 if a == b else 1e6) for a, b in nodes_of_ends]
        both = [max(row[0], row[-1]) + s for row, s in zip(replicas_end, sums, strict=True)]
        begins[0] = begins[-1] = max(both)
    expected = max(begin + end for begin, end in zip(begins, ends, strict=True))
    assert predicted.step_s == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(12))
def test_pipelines_end_when_the_clock_of_plans_says(seed):
    """Beside the simulator of plans, whose messages share no link."""
    draw = random.Random(seed)
    stages, count, slack = draw.randint(2, 6), draw.randint(1, 24), draw.randint(0, 2)
    latency = draw.choice([0, 0.3, 3.0])
    spent = tuple(draw.uniform(0.5, 2) for _ in range(stages))
    plan = replace(one_f_one_b(stages, count, slack=slack), send_slots=2 * count)
    costs = Costs(
        forward_s=tuple(each / 3 for each in spent),
        backward_s=tuple(each * 2 / 3 for each in spent),
        send_s=latency,
    )
    expected = [
        max(event.end_s for event in events if event.action.kind is Kind.BACKWARD)
        for events in simulate(plan, costs).ranks
    ]
    hops = (Hop(latency),) * (stages - 1)
    assert pipeline_ends(spent, hops, count, slack) == pytest.approx(expected)


def test_a_long_step_is_that_of_its_first_micro_batches_and_alike_ones():
    spent, hops = (1.0, 1.5, 0.7), (Hop(0.2, 0.1), Hop(0.1, 0.4))
    ends = [pipeline_ends(spent, hops, count)[0] for count in (200, 300)]
    assert ends[1] - ends[0] == pytest.approx(100 * max(estimated_period(spent, hops), 1.5))
    never = pipeline_ends(spent, hops, 300, drains=False)[0]
    assert never == pytest.approx(3 * (ends[1] - ends[0]))


def estimated_period(spent, hops):
    """The mean time of a micro-batch of a long step."""
    return (pipeline_ends(spent, hops, 60)[0] - pipeline_ends(spent, hops, 36)[0]) / 24


def test_slack_hides_a_slow_link_and_nothing_hides_one_without_room():
    fast, slow = (Hop(),), (Hop(1.0),)
    without, hidden = (pipeline_ends((1.0, 1.0), slow, 40, slack)[0] for slack in (0, 2))
    ideal = pipeline_ends((1.0, 1.0), fast, 40)[0]
    assert without > 1.5 * ideal
    assert hidden < 1.1 * ideal
    full = (Hop(0.0, 1.4),)
    assert pipeline_ends((1.0, 1.0), full, 40, 3)[0] > 1.4 * 40


@pytest.mark.parametrize("slack", [0, 2])
def test_estimates_are_near(slack):
    for seed in range(40):
        draw = random.Random(seed)
        stages = draw.randint(2, 6)
        spent = tuple(draw.uniform(0.5, 2) for _ in range(stages))
        hops = tuple(Hop(draw.choice([0, 0.1]), draw.choice([0, 0.2])) for _ in spent[1:])
        count = draw.randint(stages, 40)
        exact = max(pipeline_ends(spent, hops, count, slack))
        assert max(estimated_ends(spent, hops, count, slack)) == pytest.approx(exact, rel=0.25)


def test_replicas_that_are_cut_apart_reduce_what_none_of_them_cuts():
    """The segments of one replica's stages, over a link that each group has for itself."""
    cluster = Cluster(devices=(DEVICE,) * 4, within=Link(0.0, 1e6))
    scene = Scene(model_costs(GPT2, 64), cluster, Settings(global_batch=8))
    layout = Candidate(
        variant=Variant(stages=2, tensor_parallel=1, data_parallel=2),
        units=(((0,), (1,)), ((2,), (3,))),
        bounds=(0, 3, 8),
        shares=(4, 4),
        micro_steps=1,
        own_bounds=((0, 3, 8), (0, 5, 8)),
    )
    predicted = scene.predict(layout)
    parameters = [layer.parameters for layer in scene.costs.layers]
    ring_s = [4 * sum(parameters[a:b]) / 1e6 for a, b in ((0, 3), (3, 5), (5, 8))]
    tied = 4 * scene.costs.layers[-1].tied_parameters / 1e6
    # The second stage of the first replica and the first one of the second share the middle.
    found = predicted.step_s - max(predicted.rank_s) - tied
    assert found == pytest.approx(sum(ring_s), rel=1e-3)
