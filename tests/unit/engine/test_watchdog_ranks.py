# SPDX-License-Identifier: Apache-2.0
"""Watchdogs of two ranks: who has ended, why, and what the other one does then.

The test is one rank; the other is a process of its own that does what it is told.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from wavemare.comm.waits import waiting
from wavemare.engine.config.sections import WatchdogConfig
from wavemare.engine.health.watchdog import EXIT_CODE, Watchdog, acquire
from wavemare.engine.observe.progress import Progress
from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.files import this_machine

CLONE_NEWPID = 0x20000000
FORK = multiprocessing.get_context("fork")


def fail():
    raise ConfigError("key", "value", "the reason", "The remedy")


def group_of(folder, rank):
    store = FileStore(str(folder / "store"), 2)
    store.set_timeout(timedelta(seconds=0.1))
    return store, rank, 2


def run_peer(pipe, group, config, machine, late_s):
    watchdog = Watchdog(config, Progress(), os._exit, os._exit, machine).start()
    time.sleep(late_s)
    watchdog.meet(group_of(*group))
    worker = os.fork()  # as of a data loader: it outlives this rank
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    pipe.send(worker)
    while word := pipe.recv():
        if word == "acquire":
            acquire(config)
        elif word == "release":
            watchdog.release()
        elif word == "fail":
            torch.distributed.is_initialized = lambda: True
            run_main(fail, grace_s=0)
        pipe.send(word)


class Peer:
    """The other rank. No time passes in it: it moves all the while."""

    def __init__(self, *arguments):
        self.pipe, pipe = FORK.Pipe()
        self.process = FORK.Process(target=run_peer, args=(pipe, *arguments))
        self.process.start()

    def tell(self, *words):
        for word in words:
            self.pipe.send(word)
            assert self.pipe.recv() == word

    def kill(self):
        """Kill it; its parent does not ask for its code yet."""
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def pair(tmp_path, monkeypatch, clock, leaving):
    """Make this rank's watchdog and the other rank, which have met."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    made = []

    def pair(*, machine=None, rank=0, limit_s=100, late_s=0):
        config = WatchdogConfig(timeout_s=limit_s, folder=str(tmp_path / "w"))
        peer = Peer((tmp_path, 1 - rank), config, machine, late_s)
        left = leaving()
        options = {"clock": clock, "longest_tick_s": 0.005}
        watchdog = Watchdog(config, Progress(), left, left, **options)
        watchdog.meet(group_of(tmp_path, rank))
        made.extend([watchdog, peer, peer.pipe.recv()])
        return watchdog, peer, left

    yield pair
    watchdog, peer, worker = made
    watchdog.stop()
    os.kill(worker, signal.SIGKILL)
    peer.process.kill()
    peer.process.join()
    peer.pipe.close()


@pytest.mark.parametrize(
    ("rank", "words", "why"),
    [
        (0, (), "has ended without a word"),
        (0, ("acquire", "release"), "has ended without a word"),  # another engine is left
        (0, ("acquire", "release", "release"), "has ended by itself, after step 0"),
        (1, ("release",), "has ended by itself, after step 0"),
    ],
)
def test_a_lost_rank_is_explained_by_its_last_word(pair, tmp_path, rank, words, why):
    watchdog, peer, _ = pair(rank=rank)
    watchdog.start()
    assert watchdog.explain_loss() is None
    peer.tell(*words)
    peer.kill()
    lost = watchdog.explain_loss()
    assert lost.startswith(f"watchdog: rank {rank} has lost rank {1 - rank}\n")
    assert f"suspect: rank {1 - rank} (" in lost
    assert why in lost
    assert "has lost" in (tmp_path / "w" / f"rank_{rank:05d}.txt").read_text()


def test_a_rank_that_is_late_and_ends_by_an_error_says_so(pair):
    watchdog, peer, _ = pair(late_s=2.5)  # the store's time limit, of 0.1 s, does not count
    watchdog.start()
    peer.pipe.send("fail")
    os.waitid(os.P_PID, peer.process.pid, os.WEXITED | os.WNOWAIT)
    assert peer.process.exitcode == 2
    assert "has ended by itself, after step 0 with exit code 2" in watchdog.explain_loss()


@pytest.mark.parametrize(
    ("machine", "known", "words", "ends"),
    [
        (None, False, (), True),
        (None, False, ("release",), False),
        ("another boot", True, (), True),
        ("another boot", False, (), False),  # it may have a wrong address
    ],
)
def test_a_rank_that_waits_looks_whether_the_other_was_killed(
    pair, clock, capfd, machine, known, words, ends
):
    watchdog, peer, left = pair(machine=machine)
    if known:
        watchdog.start()
        clock.spend(12)
        peer.kill()
    else:
        peer.tell(*words)
        peer.kill()
        watchdog.start()
    with watchdog.progress.doing("backward"):
        clock.spend(12)
        assert not left.codes  # it computes
        with waiting("a message"):
            clock.spend(12)
            if not ends:
                assert not left.codes
                return
            assert left.wait() == [EXIT_CODE]
    told = capfd.readouterr().err
    assert "watchdog: rank 0 has waited for" in told
    assert "suspect: rank 1 (" in told
    assert "has ended without a word" in told


def test_a_rank_that_has_ended_in_good_order_ends_those_that_wait_for_it(pair, clock):
    watchdog, peer, left = pair(limit_s=10)
    watchdog.start()
    peer.tell("release")
    peer.kill()
    with waiting("a message"):
        clock.spend(9)
        assert not left.codes
        clock.spend(4)
        assert left.wait() == [EXIT_CODE]


@pytest.mark.long  # it waits for answers that do not come
def test_a_rank_that_computes_is_waited_for_and_one_that_is_silent_for_long_is_not(
    pair, clock, capfd
):
    watchdog, peer, left = pair(machine="another boot", limit_s=10)
    watchdog.start()
    with waiting("a message"):
        clock.spend(30)
        assert not left.codes
        told = capfd.readouterr().err.splitlines()
        assert len(told) == 2  # after 10 and 20 s
        assert f"; rank 1 ({os.uname().nodename}, pid {peer.process.pid}) computes in " in told[0]
        os.kill(peer.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)
        clock.spend(4)
        assert not left.codes  # one missing answer is no proof
        clock.spend_until(lambda: left.codes)
    # A process of the same number on this machine would be another one: it is not killed.
    assert Path(f"/proc/{peer.process.pid}/stat").read_text().split()[2] == "T"


@pytest.mark.long  # it waits for answers that do not come
def test_a_rank_of_this_machine_that_stops_before_its_first_answer_is_lost(pair, clock):
    watchdog, peer, left = pair(limit_s=10)
    os.kill(peer.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)
    watchdog.start()
    with waiting("a message"):
        clock.spend_until(lambda: left.codes)
    assert left.codes == [EXIT_CODE]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may create namespaces")
def test_numbers_of_processes_count_in_one_container():
    names, own = FORK.SimpleQueue(), FORK.SimpleQueue()

    def name():
        names.put(this_machine())

    def name_in_container():
        own.put(ctypes.CDLL(None).unshare(CLONE_NEWPID))
        child = FORK.Process(target=name)
        child.start()
        child.join()

    for target in (name, name_in_container):
        process = FORK.Process(target=target)
        process.start()
        process.join()
    if own.get() != 0:
        pytest.skip("the kernel allows no namespaces")
    assert names.get() == this_machine()
    assert names.get() != this_machine()


def test_ranks_are_asked_even_while_the_interpreter_ends():
    program = """
import atexit
from wavemare.engine.health.rank_status import PeerAddress, ask_all
peers = [PeerAddress(rank, "here", 1, "127.0.0.1", 1, "") for rank in (0, 1)]
atexit.register(lambda: print(len(ask_all(peers, "token", {"ask": "status"})), "answers"))
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == "2 answers\n", ended.stderr
