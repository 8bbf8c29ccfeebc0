# SPDX-License-Identifier: Apache-2.0
"""The probe of a running job."""

import json


def test_all_ranks_get_the_same_cluster_and_plan(launch_once):
    first, second = launch_once("probe.py")
    assert first["cluster"] == second["cluster"] == first["again"] == second["again"]
    assert first["digest"] == second["digest"]
    assert first["world_size"] == 2
    assert first["untouched"]
    cluster = json.loads(first["cluster"])
    assert len(cluster["devices"]) == 2
    for device in cluster["devices"]:
        assert 0 < device["efficiency"] <= 1
        assert 1e-4 < device["tflops"] < 100
        assert device["memory_gib"] > 0.1
        assert 0.1 < device["memory_gb_s"] < 1000
    assert 1e6 < cluster["links"]["within"]["bytes_s"] < 1e12
    assert cluster["measured"]["torch"]
