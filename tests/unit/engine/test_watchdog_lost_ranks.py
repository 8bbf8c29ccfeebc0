# SPDX-License-Identifier: Apache-2.0
"""Ranks that have certainly ended, and who looks for them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from wavemare import failure
from wavemare.bench.network import Laboratory
from wavemare.engine.watchdog import watcher
from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.progress import Progress
from wavemare.engine.watchdog.standing import Absent, Whereabouts
from wavemare.engine.watchdog.watcher import Watchdog

OBSTACLE = Laboratory.obstacle()
ELSEWHERE = Whereabouts(2, "another", 1, "127.0.0.1", 1, "another")


@pytest.fixture
def three(monkeypatch):
    """Return a watchdog, with rank 1 on its host and rank 2 on another, and how they answer."""
    watchdog, answers = Watchdog(WatchdogConfig()).start(), {}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = replace(watchdog._me, rank=1, pid=process.pid)
        watchdog._ranks = [watchdog._me, here, ELSEWHERE]

        async def ask_all(where, token, request):
            said = [(of, answers.get(of.rank, "silent")) for of in where]
            return [s if isinstance(s, dict) else Absent(of, s == "gone") for of, s in said]

        monkeypatch.setattr(watcher, "ask_all", ask_all)
        yield watchdog, answers, process
        watchdog.stop()
        process.kill()


def test_only_ranks_that_have_certainly_ended_are_said_to_have(three, monkeypatch):
    """On another host, an address that refuses may be a wrong one, unless it has answered."""
    monkeypatch.setattr(watcher, "_BLOCKED_S", 0.0)
    watchdog, answers, process = three
    there = {}
    for how, certain in (
        ("gone", set()),
        ("gone", set()),  # it has never been reached
        (there, set()),
        ("silent", set()),
        ("gone", set()),  # the way there may be blocked for a moment
        (there, set()),
        ("gone", set()),
        ("gone", {2}),
    ):
        answers |= {1: how, 2: how}
        assert watchdog.ended([0, 1, 2]) == certain
    monkeypatch.setattr(watcher, "_BLOCKED_S", 1000.0)
    assert watchdog.ended([2]) == set()  # too soon after the first refusal
    monkeypatch.setattr(watcher, "_BLOCKED_S", 0.0)
    monkeypatch.setattr(watcher, "_FORGET_S", 0.0)
    assert watchdog.ended([2]) == set()  # that was long ago
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its parent knows nothing yet
    assert watchdog.ended([0, 1]) == {1}
    watchdog.stop()
    assert watchdog.ended([1, 2]) == set()  # it cannot ask
    alone = Watchdog(WatchdogConfig())
    assert alone.ended([0, 1]) == set()  # the ranks have not met


def test_a_process_of_another_machine_of_the_same_name_is_none_of_this_one(three):
    watchdog, answers, process = three
    there = replace(watchdog._ranks[1], machine="another boot")
    watchdog._ranks[1] = there
    answers |= {1: "gone"}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    watchdog._release([Absent(there, gone=False)])
    assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"  # not killed
    process.kill()
    process.wait()
    assert watchdog.ended([1]) == set()


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))  # as root alone makes namespaces
def test_where_a_process_number_counts():
    words = ["-c", "from wavemare.engine.watchdog.watcher import _machine; print(_machine())"]
    ways = ([], [], ["unshare", "--pid", "--fork", "--mount-proc"])
    found = [
        subprocess.run([*way, sys.executable, *words], capture_output=True, check=True, text=True)
        for way in ways
    ]
    here, again, contained = [each.stdout for each in found]
    assert here == again != contained
    assert here.startswith(f"{socket.gethostname()} ")


@pytest.mark.parametrize("farewell", [None, "after step 3"])
def test_a_rank_that_waits_looks_whether_the_next_one_was_killed(three, monkeypatch, farewell):
    watchdog, answers, process = three
    monkeypatch.setattr(watcher, "_NEXT_S", 0.3)
    ended = threading.Event()
    told = []

    async def inquire():
        return [], [Absent(watchdog._ranks[1], gone=True, farewell=farewell)]

    async def end(verdict, standings, absent, headline):
        told.append((verdict.suspects, headline))
        ended.set()

    monkeypatch.setattr(watchdog, "_inquire", inquire)
    monkeypatch.setattr(watchdog, "_end", end)
    answers |= {1: "gone", 2: {}}
    process.kill()
    process.wait()
    watchdog.progress = Progress()
    with watchdog.progress.doing("backward"):
        assert not ended.wait(2)  # it computes
        watchdog.progress.at("recv", peer=2)
        assert ended.wait(5) == (farewell is None)
    if farewell is None:
        assert told[0][0] == (1,)
        assert "rank 0 has not moved for" in told[0][1]


def test_a_rank_that_ends_by_an_error_says_so_to_those_who_would_look_for_it(three, monkeypatch):
    watchdog, _, _ = three
    said = []
    monkeypatch.setattr(failure, "_group_exists", lambda: True)
    monkeypatch.setattr(failure, "leave_at_once", said.append)
    watchdog._me = replace(watchdog._me, rank=1)
    watchdog._farewells = SimpleNamespace(say=lambda *words: said.append(words))
    failure._leave(2)
    assert said == [(1, "after step 0 with exit code 2"), 2]


def test_a_farewell_that_is_cancelled_does_not_keep_a_rank_from_ending(three, monkeypatch):
    watchdog, _, _ = three
    told = []

    async def ask_all(where, token, request):
        if request["ask"] == "remember":
            told.extend(of.rank for of in where)
            raise asyncio.CancelledError  # its loop ends
        return [Absent(of, gone=False) for of in where]

    monkeypatch.setattr(watcher, "ask_all", ask_all)
    watchdog._farewells = SimpleNamespace()
    watchdog.bid_farewell(1)
    assert told == [2, 1]
