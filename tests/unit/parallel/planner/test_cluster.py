# SPDX-License-Identifier: Apache-2.0
"""Clusters: files, texts, links, and what is refused."""

import json
from dataclasses import replace

import pytest

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.parallel.planner.cluster import (
    CARDS,
    Cluster,
    Device,
    Link,
    parse_cluster,
    read_cluster,
)

FAST = Device(type="fast", tflops=20, memory_gib=32, memory_gb_s=900, node="a", efficiency=0.6)
SLOW = Device(type="slow", tflops=10, memory_gib=16, memory_gb_s=700, node="b", overhead_s=1e-3)


def test_json_round_trip(tmp_path):
    cluster = Cluster(
        devices=(FAST, FAST, SLOW),
        within=Link(1e-6, 1e10),
        between=Link(2e-5, 1e9),
        pairs={("a", "b"): Link(1e-4, 1e8)},
        measured={"torch": "2.13"},
    )
    cluster.save(tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster
    assert read_cluster(cluster) is cluster
    assert json.loads(cluster.to_json())["version"] == 1


def test_texts_name_cards_by_node(caplog):
    cluster = read_cluster("2x2xV100, 3xp100", "fp16")
    assert [device.node for device in cluster.devices] == list("0011222")
    assert cluster.types == ("V100", "P100")
    assert cluster.devices[0].tflops == 125
    assert "public peak numbers" in caplog.text


def test_a_file_may_leave_numbers_to_the_table(caplog):
    values = {"devices": [{"type": "T4", "count": 2, "node": "x", "efficiency": 0.3}]}
    first, second = parse_cluster(values).devices
    assert first == second
    assert (first.tflops, first.memory_gib, first.efficiency) == (8.1, 16, 0.3)
    assert "devices[0]: memory_gb_s, memory_gib, tflops" in caplog.text


def test_pairs_of_nodes_have_links_of_their_own():
    nodes = [{"type": "T4", "node": name} for name in "abc"]
    pairs = [{"nodes": ["b", "a"], "bytes_s": 1e8}, {"nodes": ["c", "c"], "alpha_s": 1.0}]
    values = {"devices": nodes, "links": {"between": {"bytes_s": 1e9}, "pairs": pairs}}
    cluster = parse_cluster(values)
    assert cluster.link("a", "b").bytes_s == cluster.link("b", "a").bytes_s == 1e8
    assert cluster.link("a", "c").bytes_s == 1e9
    assert cluster.link("c", "c").alpha_s == 1.0
    assert cluster.slowest_link("abc", single=True).bytes_s == 1e8
    assert cluster.slowest_link("ac", single=True).bytes_s == 1e9
    del values["links"]["between"]
    with refuses(PlanError, "cluster.links", None):
        parse_cluster(values)


def test_table():
    for name, card in CARDS.items():
        assert card.fp16 >= card.fp32 > 0, name
        assert card.bf16 in (card.fp16, card.fp32), name
        assert name == name.upper()


def test_links():
    within, between = Link(1e-4, 5e9), Link(1e-5, 1e8)
    cluster = Cluster(devices=(FAST, SLOW), within=within, between=between)
    assert cluster.link("b", "a") == between
    assert cluster.link("a", "a") == cluster.slowest_link("aa") == within
    assert cluster.slowest_link("abb") == Link(1e-4, 1e8)
    assert cluster.slowest_link("ab", single=True) == between
    assert Link(1e-3, 1e6).seconds(1e6) == pytest.approx(1.001)


def test_devices_of_a_type_are_alike():
    Cluster(devices=(FAST, replace(FAST, node="z", memory_gib=8)))
    with refuses(PlanError, "devices.type", "fast"):
        Cluster(devices=(FAST, replace(FAST, tflops=21)))
