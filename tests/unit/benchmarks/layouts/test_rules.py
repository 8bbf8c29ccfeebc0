# SPDX-License-Identifier: Apache-2.0
"""Clusters, the other rule and rows of ``benchmarks layouts``, without measuring."""

import pytest

from benchmarks.layouts.clusters import CLUSTERS, Emulated
from benchmarks.layouts.metis import metis_layout
from benchmarks.layouts.request import CHOSEN, METIS, LayoutsRequest
from benchmarks.layouts.run import _pairs, _row
from wavemare.parallel.planner.cluster import Link
from wavemare.parallel.planner.model import model_costs
from wavemare.parallel.planner.predict import Scene, Settings
from wavemare.parallel.planner.search import search_layouts

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 128,
    "n_layer": 12,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
COSTS = model_costs(GPT2, 32)
SETTINGS = Settings(
    global_batch=32,
    margin=0.0,
    recompute=False,
    zero_stages=(0,),
    max_tensor_parallel=1,
    keep=1,
)


def described(emulated, rate=1e9):
    links = {names: Link(1e-4, rate) for names, _ in _pairs(emulated)}
    return emulated.describe(2e-3, links, COSTS.parameters, 0.01)


def test_there_are_twelve_clusters_or_more_of_2_to_8_devices():
    assert len(CLUSTERS) >= 12
    assert {len(each.speeds) for each in CLUSTERS.values()} >= {2, 3, 4, 5, 6, 8}
    for emulated in CLUSTERS.values():
        assert emulated.mbit is None or len(emulated.mbit) == len(emulated.hosts)


def test_hosts_of_unlike_numbers_leave_processes_idle():
    emulated = Emulated(((1.0,), (1.0, 2.0)), (10.0, 10.0))
    assert emulated.processes == [0, 2, 3]
    assert [emulated.host(device) for device in range(3)] == [0, 1, 1]
    assert dict(_pairs(emulated)) == {("node0", "node1"): (0, 1), ("node1", "node1"): (1, 2)}


@pytest.mark.parametrize("name", ["2:1", "2 hosts by type", "1 fast 3 slow"])
def test_the_other_rule_uses_all_devices_in_proportion_to_their_speed(name):
    emulated = CLUSTERS[name]
    scene = Scene(COSTS, described(emulated), SETTINGS)
    layout = metis_layout(scene)
    used = sorted(device for row in layout.units for (device,) in row)
    assert used == list(range(len(emulated.speeds)))
    assert layout.own_bounds is None
    if layout.variant.stages == 1:
        speeds = [emulated.speeds[device] for (device,) in layout.units[0]]
        for share, speed in zip(layout.shares, speeds, strict=True):
            assert share == pytest.approx(32 / layout.micro_steps * speed / sum(speeds), abs=1)


def test_the_choice_is_predicted_to_be_no_slower_than_the_other_rules():
    for name in ("2:1:1 small", "3 fast 1 slow small", "4 fast 1 very slow small"):
        cluster = described(CLUSTERS[name])
        scene = Scene(COSTS, cluster, SETTINGS)
        other = scene.predict(metis_layout(scene))
        assert search_layouts(COSTS, cluster, SETTINGS).best.predicted.step_s <= other.step_s


def test_rows_and_what_stands_below_them():
    emulated = CLUSTERS["2:1"]
    cluster = described(emulated)
    scene = Scene(COSTS, cluster, SETTINGS)
    best = search_layouts(COSTS, cluster, SETTINGS).best
    other = metis_layout(scene)
    made = scene.layout(other, scene.predict(other))
    rows = [
        _row("2:1", emulated, CHOSEN, best, [2 * best.predicted.step_s] * 3, 1.0),
        _row("2:1", emulated, METIS, made, [4 * best.predicted.step_s] * 3, 1.0),
    ]
    assert rows[0]["error"] == pytest.approx(-0.5)
    told = "\n".join(LayoutsRequest().remarks({"rows": rows}))
    assert "median 2.000" in told
