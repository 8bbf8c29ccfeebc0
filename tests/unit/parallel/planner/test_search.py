# SPDX-License-Identifier: Apache-2.0
"""The search: memory by an independent count, never below the equal layout."""

import random
from dataclasses import replace

import pytest

from support.refusals import refuses
from wavemare.engine.config.resolve import check_config
from wavemare.errors import PlanError
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.planner import Cluster, Device, Link, find_layouts
from wavemare.parallel.planner.model import model_costs
from wavemare.parallel.planner.predict import Scene, Settings, Variant
from wavemare.parallel.planner.probe import group_types
from wavemare.parallel.planner.proposals import unlike_layouts, variants
from wavemare.parallel.planner.search import search_layouts

GIB = 2**30


def gpt2(width=256, blocks=4, heads=4, vocabulary=2000):
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": blocks,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": vocabulary,
    }


def rank_bytes(costs, chosen, rank):
    """Return a rank's bytes, counted from the text of the design rather than by the planner."""
    stage = rank // (chosen.data_parallel * chosen.tensor_parallel)
    replica = rank // chosen.tensor_parallel % chosen.data_parallel
    cuts = chosen.cuts or (0, len(costs.layers))
    if chosen.replica_cuts is not None:
        cuts = chosen.replica_cuts[replica]
    layers = costs.layers[cuts[stage] : cuts[stage + 1]]
    weights = sum(layer.parameters for layer in layers)
    if chosen.stages > 1:
        weights += sum(layer.tied_parameters for layer in layers)
    weights /= chosen.tensor_parallel
    half = costs.dtype != "fp32"
    size = 2 if half else 4
    gradient = size + (4 if half and chosen.stages > 1 else 0)
    state = 12 if half else 8
    shards = chosen.data_parallel
    total = weights * (size / shards if chosen.zero_stage == 3 else size)
    total += weights * (gradient / shards if chosen.zero_stage >= 2 else gradient)
    total += weights * (state / shards if chosen.zero_stage >= 1 else state)
    total += weights * 8 * (chosen.schedule == "pipemare")
    ahead = (chosen.stages - 1 - stage) * (1 + chosen.slack) + 1
    if chosen.schedule == "1f1b":
        ahead = min(chosen.micro_steps, ahead)
    samples, largest = chosen.shares[replica], 0.0
    for layer in layers:
        kept = layer.kept_bytes + layer.split_bytes / chosen.tensor_parallel
        if layer.is_block and chosen.recompute:
            largest = max(largest, kept)
            kept = costs.boundary_bytes
        total += ahead * samples * kept
    if chosen.recompute:
        blocks = [layer for layer in costs.layers if layer.is_block]
        every = [b.kept_bytes + b.split_bytes / chosen.tensor_parallel for b in blocks]
        total += samples * max(every)
    return total * 1.13


def check_memory(found, margin):
    for chosen in (*found.layouts, *([found.equal] if found.equal else [])):
        order = chosen.order or range(chosen.world_size)
        for rank, device in enumerate(order):
            needed = rank_bytes(found.costs, chosen, rank)
            assert needed == pytest.approx(chosen.predicted.memory_bytes[rank], rel=1e-9)
            assert needed <= found.cluster.devices[device].memory_gib * GIB * (1 - margin)


def random_cluster(draw):
    devices = []
    for kind in range(draw.randint(1, 3)):
        device = Device(
            type=f"t{kind}",
            tflops=draw.uniform(1, 20),
            memory_gib=draw.choice([0.004, 0.02, 0.1, 0.2, 0.5, 1, 4]),
            memory_gb_s=draw.uniform(50, 900),
            efficiency=draw.uniform(0.3, 1),
            overhead_s=draw.choice([0, 1e-4]),
        )
        for _ in range(draw.randint(1, 2)):
            node = f"n{len({d.node for d in devices})}"
            devices += [replace(device, node=node)] * draw.choice([1, 2, 2, 4])
    if draw.random() < 0.3:
        draw.shuffle(devices)
    return Cluster(
        devices=tuple(devices),
        within=Link(1e-5, draw.uniform(1e9, 5e10)),
        between=Link(3e-5, draw.uniform(1e8, 5e9)),
    )


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.nightly if part else pytest.mark.long)
        for part in range(10)
    ],
)
def test_500_random_clusters_fit_and_never_fall_below_the_equal_layout(part):
    found_some = refused = gains = 0
    for seed in range(50 * part, 50 * (part + 1)):
        draw = random.Random(seed)
        cluster = random_cluster(draw)
        config = gpt2(draw.choice([64, 128, 256]), draw.randint(2, 6), 4, draw.choice([500, 8000]))
        dtype = draw.choice(["fp32", "bf16"])
        costs = model_costs(config, draw.choice([32, 128]), dtype=dtype)
        margin = draw.choice([0.0, 0.05, 0.2])
        settings = Settings(
            global_batch=len(cluster.devices) * draw.choice([2, 4, 12]),
            margin=margin,
            pipemare=draw.random() < 0.3,
            leave_out=draw.random() < 0.3,
        )
        try:
            found = search_layouts(costs, cluster, settings)
        except PlanError:
            refused += 1
            continue
        found_some += 1
        check_memory(found, margin)
        speeds = [chosen.predicted.tokens_per_s for chosen in found.layouts]
        assert speeds == sorted(speeds, reverse=True)
        assert 1 <= len(speeds) <= settings.keep
        if found.equal:
            assert speeds[-1] >= found.equal.predicted.tokens_per_s
            gains += found.gain > 1.01
        for chosen in found.layouts:
            assert chosen.world_size <= len(cluster.devices)
            assert Layout.from_json(chosen.to_json()) == chosen
            check_units(cluster, chosen)
    assert found_some > 25
    assert refused > 0
    assert gains > 8


def check_units(cluster, chosen):
    """The ranks that share a layer are of one type and in one node."""
    order = chosen.order or tuple(range(chosen.world_size))
    for first in range(0, chosen.world_size, chosen.tensor_parallel):
        unit = [cluster.devices[d] for d in order[first : first + chosen.tensor_parallel]]
        assert len({(device.type, device.node) for device in unit}) == 1


@pytest.mark.nightly
def test_64_devices_of_3_types_and_100_layers():
    config = gpt2(2048, 96, 16, 50257)
    found = find_layouts(
        config, "3x8xA100-80,3x8xV100-32,2x8xA10", global_batch=512, sequence_length=1024
    )
    assert len(found.costs.layers) == 100
    assert len(found.layouts) == 5  # others are slower than the equal layout
    assert found.gain > 1.1
    check_memory(found, 0.05)


def test_two_card_generations_get_shares_by_speed():
    """8 V100 and 8 P100 as replicas: 40 and 24 of 512 samples, and nearly the bound's gain."""
    devices = [
        Device(type=name, tflops=tflops, memory_gib=64, memory_gb_s=1e5, node=name, efficiency=0.5)
        for name, tflops in [("V", 15.7)] * 8 + [("P", 9.3)] * 8
    ]
    cluster = Cluster(devices=tuple(devices), within=Link(0, 1e15), between=Link(0, 1e15))
    found = find_layouts(
        gpt2(vocabulary=50000),
        cluster,
        global_batch=512,
        sequence_length=128,
        max_stages=1,
        max_tensor_parallel=1,
    )
    assert found.best.micro_steps in (1, 2)
    scale = 3 - found.best.micro_steps
    assert found.best.shares in ((20 * scale,) * 8 + (12 * scale,) * 8, (40,) * 8 + (24,) * 8)
    assert found.gain == pytest.approx(1.333, abs=0.01)
    assert found.best.order is None


def test_an_engine_takes_every_plan_of_unlike_devices():
    found = find_layouts("gpt2", "2xV100,2xP100", global_batch=64, sequence_length=1024)
    assert any(not chosen.balanced for chosen in found.layouts)
    for chosen in found.layouts:
        check_config(chosen.configure({}), world_size=4)


def test_batches_that_no_layout_divides():
    sizes = {"global_batch": 3, "sequence_length": 64, "max_stages": 1}
    with refuses(PlanError, "global_batch", 3):
        find_layouts(gpt2(blocks=1, heads=1), "8xT4", leave_out=False, **sizes)
    assert find_layouts(gpt2(blocks=1, heads=1), "8xT4", **sizes).best.world_size in (1, 3)


def test_memory_moves_a_plan_to_recomputation_or_partition():
    roomy = Device(type="d", tflops=10, memory_gib=16, memory_gb_s=900)
    costs = model_costs(gpt2(512, 8, 8), 512)
    wide = search_layouts(costs, Cluster(devices=(roomy,) * 2), Settings(global_batch=32))
    tight = replace(roomy, memory_gib=0.55)
    narrow = search_layouts(costs, Cluster(devices=(tight,) * 2), Settings(global_batch=32))
    assert narrow.best.predicted.tokens_per_s <= wide.best.predicted.tokens_per_s
    check_memory(narrow, 0.05)


def test_types_of_a_probe_are_names_and_speeds():
    def device(tflops, node="a"):
        return Device(type="cpu", tflops=tflops, memory_gib=8, memory_gb_s=10, node=node)

    found = group_types([device(2.0), device(1.0), device(2.1, "b"), device(1.05)])
    assert [d.type for d in found] == ["cpu#1", "cpu#0", "cpu#1", "cpu#0"]
    assert found[0].tflops == pytest.approx(2.05)
    assert found[2].node == "b"
    assert {d.type for d in group_types([device(1.0), device(1.05)])} == {"cpu"}
    Cluster(devices=found)


def test_neighbours_are_stages_of_a_replica_or_replicas_of_a_stage():
    device = Device(type="d", tflops=10, memory_gib=16, memory_gb_s=900)
    cluster = Cluster(devices=tuple(replace(device, node=name) for name in "aabb"))
    scene = Scene(model_costs(gpt2(), 64), cluster, Settings(global_batch=8))
    variant = Variant(stages=2, tensor_parallel=1, data_parallel=2)
    grids = {layout.units for layout in unlike_layouts(scene, variant, 2, float("inf"))}
    assert grids == {(((0,), (2,)), ((1,), (3,))), (((0,), (1,)), ((2,), (3,)))}


@pytest.mark.parametrize("pipemare", [False, True])
def test_the_best_plan_is_as_fast_as_the_fastest_of_all_layouts(pipemare):
    devices = [
        Device(type=f"{tflops}", tflops=tflops, memory_gib=16, memory_gb_s=1e5)
        for tflops in (3, 3, 1, 1)
    ]
    cluster = Cluster(devices=tuple(devices), within=Link(0, 1e15), between=Link(0, 1e15))
    costs = model_costs(gpt2(64, 2, 4, 100), 64)
    settings = Settings(global_batch=6, pipemare=pipemare, max_tensor_parallel=1)
    scene = Scene(costs, cluster, settings)
    seconds = [
        scene.predict(layout).step_s
        for variant in variants(scene)
        for micro_steps in (1, 2, 3, 6)
        if 6 % (micro_steps * variant.data_parallel) == 0
        for layout in unlike_layouts(scene, variant, micro_steps, float("inf"))
    ]
    found = search_layouts(costs, cluster, settings).best
    assert found.predicted.step_s <= min(seconds) * (1 + 1e-9)  # it may move layers and samples
    assert found.schedule == ("pipemare" if pipemare else "1f1b")


def fixed(*speeds, nodes=None, memory_gib=64, **changes):
    """A cluster whose links take no time unless they are given."""
    nodes = nodes or "a" * len(speeds)
    devices = tuple(
        Device(type=f"{s}", tflops=s, memory_gib=memory_gib, memory_gb_s=1e5, node=node)
        for s, node in zip(speeds, nodes, strict=True)
    )
    return Cluster(
        devices=devices, **{"within": Link(0, 1e15), "between": Link(0, 1e15), **changes}
    )


SMALL = {"zero_stages": (0,), "recompute": False, "max_tensor_parallel": 1}


def test_replicas_of_unlike_mixes_are_cut_apart_where_the_engine_runs_it():
    """Speeds 3 and 1 beside 2 and 2, of devices none of which holds the whole model."""
    costs = model_costs(gpt2(256, 12, 4, 100), 64)
    cluster = fixed(3, 2, 2, 1, memory_gib=0.16)
    settings = Settings(global_batch=64, max_stages=2, **SMALL)
    found = search_layouts(costs, cluster, settings).best
    assert (found.stages, found.data_parallel) == (2, 2)
    assert found.replica_cuts is not None
    check_config(found.configure({}), world_size=4)
    alike = [
        scene.predict(layout.cut((bounds,) * 2)).step_s
        for scene in [Scene(costs, cluster, settings)]
        for layout in unlike_layouts(
            scene, Variant(stages=2, tensor_parallel=1, data_parallel=2), found.micro_steps, 1e9
        )
        for bounds in [(0, n, 16) for n in range(5, 12)]
        if scene.predict(layout.cut((bounds,) * 2))
    ]
    assert found.predicted.step_s < min(alike)
    half = search_layouts(replace(costs, dtype="bf16"), cluster, settings)
    assert all(layout.replica_cuts is None for layout in half.layouts)


def test_a_device_that_slows_the_rest_is_left_out():
    cluster = fixed(4, 4, 0.05)
    costs = model_costs(gpt2(128, 2, 4, 100), 64)
    settings = Settings(global_batch=8, max_stages=1, **SMALL)
    found = search_layouts(costs, cluster, settings).best
    assert found.world_size == 2
    assert {cluster.devices[d].tflops for d in found.order or (0, 1)} == {4}
    with_all = search_layouts(costs, cluster, replace(settings, leave_out=False, max_stages=3))
    assert with_all.best.world_size == 3
    far = fixed(4, 4, 4, nodes="aab", between=Link(0.0, 1e5))
    assert search_layouts(costs, far, settings).best.world_size == 2


def test_slack_is_chosen_for_a_slow_link_between_stages_alone():
    costs = model_costs(gpt2(256, 8, 4, 100), 64)
    settings = Settings(global_batch=32, **SMALL)
    near = fixed(1e-3, 1e-3, memory_gib=0.1)
    assert search_layouts(costs, near, settings).best.slack == 0
    far = replace(near, within=Link(0.3, 1e9))
    found = search_layouts(costs, far, settings).best
    assert found.slack > 0
    assert found.configure({})["wavemare"]["pipeline"]["slack"] == found.slack
    check_config(found.configure({}), world_size=2)


def test_experts_are_divided_where_they_do_not_fit():
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 100,
    }
    costs = model_costs(config, 32)
    whole = 16 * costs.parameters * 1.13 / GIB
    settings = Settings(global_batch=8, max_stages=1, **{**SMALL, "zero_stages": (0, 1)})
    tight = search_layouts(costs, fixed(1, 1, memory_gib=0.7 * whole), settings).best
    assert tight.expert_parallel == 2
    assert tight.configure({})["wavemare"]["expert_parallel"] == {"size": 2}
    check_config(tight.configure({}), world_size=2)


def test_what_was_assumed_is_told():
    found = find_layouts(
        {**gpt2(), "dtype": "bfloat16"}, "1x2xH100", global_batch=8, sequence_length=64
    )
    told = str(found)
    assert found.costs.dtype == "bf16"
    for text in ("bf16, of the model's configuration", "450 GB/s (H100)", "efficiency of 0.5"):
        assert text in told
    assert found.cluster.devices[0].tflops == 989


def test_a_model_that_nothing_holds_is_told_the_least_that_does():
    costs = model_costs(gpt2(512, 8, 8), 64)
    with pytest.raises(PlanError) as caught:
        search_layouts(costs, fixed(1, 1, memory_gib=0.01), Settings(global_batch=2))
    least = float(caught.value.reason.rpartition("; ")[2].split()[0])
    assert search_layouts(costs, fixed(1, 1, memory_gib=1.01 * least), Settings(global_batch=2))
