# SPDX-License-Identifier: Apache-2.0
"""Watchdogs of two ranks: who has ended, why, and what the other one does then.

The test is one rank; the other is a process of its own that does what it is told.
"""

import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, TCPStore

from wavemare.comm.waits import waiting
from wavemare.engine.config.sections import WatchdogConfig
from wavemare.engine.health.watchdog import EXIT_CODE, Watchdog, acquire
from wavemare.engine.launch.environment import free_port
from wavemare.engine.observe.progress import Progress
from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.files import this_machine

pytestmark = pytest.mark.long

CLONE_NEWPID = 0x20000000
FORK = multiprocessing.get_context("fork")


def fail():
    raise ConfigError("key", "value", "the reason", "The remedy")


def group_of(place, rank):
    """Return what `Watchdog.meet` takes, with a store in a file or at a port."""
    if isinstance(place, int):
        store = TCPStore("127.0.0.1", place, 2, rank == 0, wait_for_workers=False)
    else:
        store = FileStore(str(place), 2)
    store.set_timeout(timedelta(seconds=0.1))
    return store, rank, 2


class Ticks:
    """The real time, and how often the watchdog has asked for it."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return time.monotonic()


def run_peer(pipe, group, config, machine, late_s):
    ticks = Ticks()
    options = {"clock": ticks, "longest_tick_s": 0.01}
    watchdog = Watchdog(config, Progress(), os._exit, os._exit, machine, **options).start()
    time.sleep(late_s)
    watchdog.meet(group := group_of(*group))  # a store at a port goes with its first owner
    worker = os.fork()  # as of a data loader: it outlives this rank
    if worker == 0:
        time.sleep(600)
        os._exit(0)
    pipe.send(worker)
    while word := pipe.recv():
        if word == "acquire":
            acquire(config)
        elif word == "release":
            watchdog.release()
        elif word == "look":
            before = ticks.count
            while ticks.count < before + 4:
                time.sleep(0.001)
        elif word == "end":
            watchdog._board.decide(json.dumps(["watchdog: it ends", 0, [1]]), 300)
        elif word == "hold":
            pipe.send(word)
            ctypes.PyDLL(None).sleep(600)  # without giving way to other threads
        elif word == "fail":
            torch.distributed.is_initialized = lambda: True
            run_main(fail, grace_s=0)
        pipe.send(word)


class Peer:
    """The other rank, which says something new before each second of the test's clock."""

    def __init__(self, clock, *arguments):
        self.pipe, pipe = FORK.Pipe()
        self.process = FORK.Process(target=run_peer, args=(pipe, *arguments))
        self.process.start()
        self.clock = clock

    def meet(self):
        """Return the number of its worker, when it has met the test's watchdog."""
        worker = self.pipe.recv()
        self.clock.meanwhile = lambda: self.tell("look")
        return worker

    def tell(self, *words):
        for word in words:
            if word in ("release", "hold"):
                self.clock.meanwhile = lambda: None
            self.pipe.send(word)
            assert self.pipe.recv() == word

    def signal(self, number, options):
        self.clock.meanwhile = lambda: None
        os.kill(self.process.pid, number)
        os.waitid(os.P_PID, self.process.pid, options | os.WNOWAIT)

    def kill(self):
        """Kill it; its parent does not ask for its code yet."""
        self.signal(signal.SIGKILL, os.WEXITED)

    def stop(self):
        self.signal(signal.SIGSTOP, os.WSTOPPED)

    @property
    def state(self):
        return Path(f"/proc/{self.process.pid}/stat").read_text().split()[2]


@pytest.fixture
def pair(tmp_path, monkeypatch, clock, leaving):
    """Make this rank's watchdog and the other rank, which have met."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    made = []

    def pair(*, machine=None, rank=0, limit_s=100, late_s=0, place=None):
        config = WatchdogConfig(timeout_s=limit_s, folder=str(tmp_path / "w"))
        place = place or tmp_path / "store"
        peer = Peer(clock, (place, 1 - rank), config, machine, late_s)
        left = leaving()
        options = {"clock": clock, "longest_tick_s": 0.005}
        watchdog = Watchdog(config, Progress(), left, left, **options)
        watchdog.meet(group := group_of(place, rank))
        made.extend([watchdog, peer, peer.meet(), group])
        return watchdog, peer, left

    yield pair
    watchdog, peer, worker, _ = made
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
    peer.tell(*words)
    peer.kill()
    lost = watchdog.explain_loss()
    assert lost.startswith(f"watchdog: rank {rank} has lost rank {1 - rank}\n")
    assert f"suspect: rank {1 - rank} (" in lost
    assert why in lost
    assert "has lost" in (tmp_path / "w" / f"rank_{rank:05d}.txt").read_text()


@pytest.mark.parametrize(("words", "is_lost"), [((), True), (("release",), False)])
def test_a_first_rank_that_is_lost_with_the_store_is_explained_if_it_said_no_last_word(
    pair, clock, words, is_lost
):
    watchdog, peer, _ = pair(rank=1, place=free_port())
    watchdog.start()
    peer.tell(*words)
    clock.let_it_look()
    peer.kill()
    lost = watchdog.explain_loss()
    assert bool(lost) == is_lost
    if is_lost:
        assert lost.startswith("watchdog: rank 1 has lost rank 0\nsuspect: rank 0 (")
        assert "has ended without a word" in lost


def test_a_rank_that_is_late_and_ends_by_an_error_says_so(pair):
    watchdog, peer, _ = pair(late_s=2.5)  # the store's time limit, of 0.1 s, does not count
    watchdog.start()
    assert watchdog.explain_loss() is None
    peer.pipe.send("fail")
    os.waitid(os.P_PID, peer.process.pid, os.WEXITED | os.WNOWAIT)
    assert peer.process.exitcode == 2
    assert "has ended by itself, after step 0 with exit code 2" in watchdog.explain_loss()


@pytest.mark.parametrize(
    ("machine", "words", "ends"),
    [(None, (), True), (None, ("release",), False), ("another boot", (), False)],
)
def test_a_rank_that_waits_looks_whether_another_of_its_machine_was_killed(
    pair, clock, capfd, machine, words, ends
):
    watchdog, peer, left = pair(machine=machine)
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


@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_rank_that_computes_is_waited_for_and_one_that_is_silent_for_long_is_not(
    pair, clock, capfd, fault
):
    watchdog, peer, left = pair(machine="another boot", limit_s=10)
    watchdog.start()
    with waiting("a message"):
        clock.spend(30)
        assert not left.codes
        told = capfd.readouterr().err.splitlines()
        assert len(told) == 2  # after 10 and 20 s
        assert f"; rank 1 ({os.uname().nodename}, pid {peer.process.pid}) computes in " in told[0]
        getattr(peer, fault)()
        clock.spend(4)
        assert not left.codes  # a short silence is no proof
        clock.spend_until(lambda: left.codes)
    assert "suspect: rank 1 (" in (told := capfd.readouterr().err)
    assert "does not answer" in told
    # A process of the same number on this machine would be another one: it is not killed.
    assert peer.state == {"stop": "T", "kill": "Z"}[fault]


def test_a_rank_of_this_machine_that_is_stopped_is_lost_and_killed_in_the_end(pair, clock):
    watchdog, peer, left = pair(limit_s=10)
    peer.stop()  # before it has said anything but its name
    watchdog.start()
    with waiting("a message"):
        clock.spend_until(lambda: left.codes)
    assert left.codes == [EXIT_CODE]
    peer.process.join()
    assert peer.process.exitcode == -signal.SIGKILL


def test_a_rank_of_this_machine_that_gives_way_to_no_thread_computes(pair, clock, capfd):
    watchdog, peer, left = pair(limit_s=10)
    watchdog.start()
    peer.tell("hold")
    with waiting("a message"):
        clock.spend(30)
    assert not left.codes
    assert "suspect" not in capfd.readouterr().err


def test_a_rank_that_computes_when_another_ends_the_run_is_ended_when_it_waits(
    pair, tmp_path, clock, capfd
):
    watchdog, peer, left = pair()
    watchdog.start()
    peer.tell("end")
    clock.spend(12)
    assert not left.codes
    with waiting("a message"):
        assert left.wait() == [EXIT_CODE]
    assert capfd.readouterr().err == "watchdog: it ends\n"
    assert "it ends" in (tmp_path / "w" / "rank_00000.txt").read_text()


@pytest.mark.parametrize(
    ("fault", "why"), [("stop", "does not answer"), ("kill", "has ended without a word")]
)
def test_the_rank_that_has_the_store_is_found_without_it(pair, clock, capfd, fault, why):
    watchdog, peer, left = pair(rank=1, limit_s=10, place=free_port())
    watchdog.start()
    clock.spend(3)
    getattr(peer, fault)()
    with waiting("a message"):
        clock.spend_until(lambda: left.codes)
    assert left.codes == [EXIT_CODE]
    told = capfd.readouterr().err
    assert told.count("suspect: rank 0 (") == 1
    assert why in told


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_rank_that_leaves_deletes_all_keys(pair, first):
    watchdog, peer, _ = pair(place=(port := free_port()))
    store = TCPStore("127.0.0.1", port, 2, False)
    watchdog.start()
    assert store.num_keys() == 1 + 4  # one is torch's own; a file store has one or two
    for release in (watchdog.release, partial(peer.tell, "release"))[:: 1 - 2 * first]:
        release()
    assert store.num_keys() == 1


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


def test_a_rank_says_its_last_word_even_while_its_interpreter_ends(tmp_path, monkeypatch):
    # Both count their meetings from 0.
    monkeypatch.setattr("wavemare.engine.health.board._meetings", itertools.count())
    program = f"""
from torch.distributed import FileStore
from wavemare.engine.config.sections import WatchdogConfig
from wavemare.engine.health.watchdog import Watchdog
Watchdog(WatchdogConfig()).start().meet((FileStore({str(tmp_path / "store")!r}, 2), 1, 2))
"""
    other = subprocess.Popen([sys.executable, "-c", program])
    watchdog = Watchdog(WatchdogConfig(folder=str(tmp_path / "w"))).start()
    watchdog.meet(group_of(tmp_path / "store", 0))
    assert other.wait(600) == 0
    assert "has ended by itself, after step 0" in watchdog.explain_loss()
    watchdog.release()
