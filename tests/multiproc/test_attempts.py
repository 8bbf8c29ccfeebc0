# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts again meet, whatever its store holds; the probe of a running job."""

import json

import pytest
from torch.distributed import TCPStore

from support.refusals import refuses
from wavemare.engine.launch.group import init_attempt
from wavemare.errors import LaunchError


@pytest.mark.world_size(2)
def test_ranks_that_are_started_again_meet(launch):
    """Whichever comes first would read the other one's last address, where nobody listens."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for slow in (0, 1):
        environment = {
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCHELASTIC_RESTART_COUNT": str(slow),
        }
        finished = launch("attempts.py", slow, environment=environment, own=True).check()
        assert [finished.result(rank) for rank in (0, 1)] == [[2.0, 2.0]] * 2


def test_a_store_that_several_agents_share_is_refused(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with refuses(LaunchError, "--max-restarts", "3"):
        init_attempt("gloo")


def test_all_ranks_get_the_same_cluster_and_plan(launch_once):
    first, second = launch_once("probe.py")
    assert first["cluster"] == second["cluster"] == first["again"] == second["again"]
    assert first["digest"] == second["digest"]
    # Where the measured link is slow, one device alone may be the fastest layout.
    assert first["world_size"] in (1, 2)
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
