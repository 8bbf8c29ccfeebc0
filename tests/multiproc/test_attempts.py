# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts again: its store still holds what the ones before have written."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from wavemare.engine.torchrun import agree_on_name
from wavemare.errors import LaunchError


@pytest.mark.world_size(2)
def test_ranks_that_are_started_again_meet(launch):
    """Whichever comes first would read the other one's last address, where nobody listens."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    for slow in (0, 1):
        finished = launch("attempts.py", slow, environment=environment, own=True).check()
        assert [finished.result(rank) for rank in (0, 1)] == [[2.0, 2.0]] * 2


def test_each_attempt_has_a_name_of_its_own():
    store, names = HashStore(), set()
    for _ in range(3):
        found = {}

        def join(rank, found=found):
            found[rank] = agree_on_name(store, rank, 3, timedelta(seconds=120))

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
    with pytest.raises(LaunchError, match=r"\[1, 2\] have not come"):
        agree_on_name(store, 0, 3, timedelta(seconds=0.2))
