# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts again meet, whatever its store holds; the probe of a running job."""

import json
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from wavemare.comm.meeting import agree_on_name
from wavemare.engine.launch.restart import init_attempt
from wavemare.errors import CommError, LaunchError


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
    with pytest.raises(LaunchError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        init_attempt("gloo")


def test_each_attempt_has_a_name_of_its_own():
    store, names = HashStore(), set()
    for _ in range(3):
        found = {}

        def join(rank, found=found):
            found[rank] = agree_on_name(store, rank, range(3), timedelta(seconds=120))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 2, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (name,) = set(found.values())
        assert len(found) == 3
        assert name not in names
        names.add(name)


def test_ranks_that_do_not_come_are_named():
    store = HashStore()
    store.set("wavemare-attempt/hello/1", "of an earlier attempt")
    with pytest.raises(CommError, match=r"\[1, 2\]: they have not come"):
        agree_on_name(store, 0, range(3), timedelta(seconds=0.2))
    with pytest.raises(CommError, match=r"\[0\]: they have not come"):
        agree_on_name(store, 2, range(3), timedelta(seconds=0.2))


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
