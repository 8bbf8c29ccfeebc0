# SPDX-License-Identifier: Apache-2.0
"""One watchdog for all engines of a process, and how those of the ranks meet."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.farewell import Farewells
from wavemare.engine.watchdog.watcher import Watchdog, current, hold


def test_engines_share_the_watchdog_until_the_last_has_gone(caplog):
    first = hold(WatchdogConfig(timeout_s=60))
    second = hold(WatchdogConfig(timeout_s=60))
    assert not caplog.records
    assert second is first
    third = hold(WatchdogConfig(timeout_s=9, folder="other"))
    assert third is first
    assert first.config.timeout_s == 60
    (told,) = [record.getMessage() for record in caplog.records]
    assert "timeout_s = 9.0, folder = other" in told
    assert "goes on with timeout_s = 60.0, folder = wavemare-watchdog" in told
    third.release()
    second.release(farewell=False)  # its engine could not be built
    assert current() is first
    assert first._thread.is_alive()
    first.release()
    assert current() is None
    assert not first._thread.is_alive()
    after = hold(WatchdogConfig(timeout_s=9))
    assert after is not first
    after.release()
    assert current() is None


def test_only_the_last_engine_says_farewell(monkeypatch):
    words = []
    watchdog = hold(WatchdogConfig())
    monkeypatch.setattr(watchdog, "bid_farewell", lambda: words.append("farewell"))
    hold(WatchdogConfig())
    watchdog.release()
    assert not words
    watchdog.release()
    assert words == ["farewell"]


def test_an_engine_may_be_collected_by_the_watchdogs_own_thread(monkeypatch, caplog):
    # Where it told the others, it would wait that long for their answers, which it reads itself.
    monkeypatch.setattr("wavemare.engine.watchdog.watcher._GRACE_S", 60.0)
    watchdog = hold(WatchdogConfig())
    watchdog._farewells, watchdog._ranks = Farewells(None, "secret"), [watchdog._me] * 2
    watchdog._loop.call_soon_threadsafe(watchdog.release)
    watchdog._thread.join(30)
    assert not watchdog._thread.is_alive()
    assert current() is None
    assert not caplog.records  # of an error in that thread, as in waiting for itself


def meet_all(monkeypatch, watchdogs):
    """Have watchdogs, as if of the ranks of one group, meet."""
    store = torch.distributed.HashStore()
    here = threading.local()
    distributed_c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: here.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(watchdogs))
    monkeypatch.setattr("wavemare.engine.watchdog.watcher._meetings", itertools.repeat(0))

    def meet(rank):
        here.rank = rank
        watchdogs[rank].meet()

    with ThreadPoolExecutor(len(watchdogs)) as pool:
        list(pool.map(meet, range(len(watchdogs))))
    (token,) = {watchdog._token for watchdog in watchdogs}
    (ranks,) = {tuple(watchdog._ranks) for watchdog in watchdogs}
    assert ranks == tuple(watchdog._me for watchdog in watchdogs)
    return token


def test_ranks_meet_again_though_only_some_share_a_watchdog(monkeypatch):
    """An engine that is not destroyed is collected sooner on one rank than on another."""
    a, b, c = (Watchdog(WatchdogConfig()) for _ in range(3))
    try:
        first = meet_all(monkeypatch, [a, b])
        assert first
        assert meet_all(monkeypatch, [a, b]) == first  # who is asked meanwhile, answers
        assert meet_all(monkeypatch, [a, c]) != first
    finally:
        for watchdog in (a, b, c):
            watchdog.start().stop()
