# SPDX-License-Identifier: Apache-2.0
"""One rank's watchdog: whom it blames, what it reports, when it ends the process."""

import asyncio
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.farewell import Farewells
from wavemare.engine.watchdog.peers import ask, listening_socket, reachable_address, serve
from wavemare.engine.watchdog.progress import Followed, Progress
from wavemare.engine.watchdog.report import report_text
from wavemare.engine.watchdog.standing import Absent, Standing, Whereabouts
from wavemare.engine.watchdog.verdict import judge
from wavemare.engine.watchdog.watcher import EXIT_CODE, Watchdog, current, hold
from wavemare.pipeline.action import Action, Kind

RANKS = [Whereabouts(r, f"node{r}", 100 + r, "127.0.0.1", 1, f"{r}") for r in range(3)]
STUCK = Standing(
    rank=0,
    what="backward",
    peer=None,
    age_s=9.0,
    patience_s=5.0,
    outside=False,
    waits=True,
    step=4,
    finished="forward",
    line="train.py:7 (main)",
    plan="",
)


def standing(rank, **changes):
    return replace(STUCK, rank=rank, **changes)


@pytest.mark.parametrize(
    ("standings", "absent", "suspects", "words"),
    [
        ([standing(0)], [Absent(RANKS[1], gone=False)], (1,), "does not answer"),
        ([standing(0)], [Absent(RANKS[1], gone=True)], (1,), "without a word"),
        ([standing(0)], [Absent(RANKS[1], True, "after step 3")], (1,), "by itself, after step 3"),
        ([standing(0), standing(1, waits=False, what="the data loader")], [], (1,), "data loader"),
        ([standing(0), standing(1, waits=False, outside=True)], [], (1,), "no other rank"),
        ([standing(0), standing(1, lock="/x/lock")], [], (1,), "/x/lock"),
        ([standing(0), standing(1, step=3), standing(2)], [], (1,), "in step 3"),
        ([standing(0), standing(1), standing(2)], [], (), "wait for each other"),
    ],
)
def test_the_rank_to_blame_is_named(standings, absent, suspects, words):
    verdict = judge(standings, absent)
    assert verdict.suspects == suspects
    assert words in verdict.reason
    summary = verdict.summary(RANKS, standings, absent, "nothing moves", "/runs/one")
    assert summary.startswith("watchdog: nothing moves\nsuspect: ")
    for rank in suspects:
        assert str(RANKS[rank]) in summary.splitlines()[1]
    assert "/runs/one/rank_*.txt" in summary


@pytest.mark.parametrize("absent", [[], [Absent(RANKS[2], gone=False)]])
def test_a_run_is_slow_and_not_stuck_while_one_rank_moves(absent):
    assert judge([standing(0), standing(1, age_s=4.9, waits=False)], absent) is None


def test_the_summary_of_a_thousand_ranks_fits_a_screen():
    many = [Whereabouts(rank, "node", rank, "127.0.0.1", 1, "") for rank in range(1000)]
    standings = [standing(rank) for rank in range(999)]
    absent = [Absent(many[999], gone=True)]
    summary = judge(standings, absent).summary(many, standings, absent, "", "")
    assert len(summary.splitlines()) < 25
    assert "rank 999" in summary


def test_progress_says_where_the_thread_is_and_what_it_finished():
    progress = Progress()
    assert progress.place.outside
    with progress.doing("train_batch"):
        with progress.doing("forward"):
            assert str(progress.place) == "forward"
        assert str(progress.finished) == "forward"
        assert str(progress.place) == "train_batch"
        progress.at(Action(Kind.RECV_GRAD, 2, 5, 1), peer=3)
        assert str(progress.place) == "recv grad of micro-batch 5 (2RG5@1)"
        assert progress.place.peer == 3
    assert progress.place.outside
    assert list(progress.reading(iter([1, 2]))) == [1, 2]
    assert progress.broken is None
    with pytest.raises(ZeroDivisionError), progress.doing("train_batch"), progress.doing("step"):
        _ = 1 / 0
    assert str(progress.broken) == "step"
    assert progress.place.outside


def test_what_takes_long_once_has_more_time():
    progress = Progress()
    assert progress.patience(1, 50) == 50  # before the first step has ended
    progress.end_step()
    assert progress.patience(1, 50) == 1
    with progress.doing("save_checkpoint", long=True), progress.doing("forward"):
        assert progress.patience(1, 50) == 50
    assert progress.patience(1, 50) == 1


def test_a_schedule_is_followed_with_the_ranks_at_the_other_end():
    class Instruction:
        def __init__(self, action):
            self.action = action

    class Schedule:
        def steps(self):
            kinds = (Kind.RECV_ACTIVATION, Kind.FORWARD, Kind.SEND_ACTIVATION)
            yield from ([Instruction(Action(kind, 1, 0))] for kind in kinds)

        def num_pipe_buffers(self):
            return 3

    class Grid:
        def stage_to_global(self, stage_id):
            return 10 * stage_id

    progress = Progress()
    neighbours = {Kind.RECV_ACTIVATION: -1, Kind.SEND_ACTIVATION: 1}
    followed = Followed(Schedule(), progress, Grid(), neighbours)
    found = [(progress.position, progress.place.peer) for _ in followed]
    assert found == [(0, 0), (1, None), (2, 20)]
    assert progress.plan == ("1RA0", "1F0", "1SA0")
    assert followed.num_pipe_buffers() == 3
    here = Standing.of(1, progress, WatchdogConfig())
    assert here.plan == "1RA0 1F0 [1SA0]"
    assert here.waits
    with ThreadPoolExecutor(1) as pool:  # the watchdog is a thread of its own
        report = pool.submit(report_text, RANKS[1], here, progress, "nothing moves").result()
    assert "[1SA0]" in report
    assert "last finished: forward of micro-batch 0 (1F0)" in report
    assert "test_a_schedule_is_followed" in report  # the stack


def test_waiting_is_told_from_working_by_the_stack():
    progress = Progress()
    future = torch.futures.Future()

    def train():
        with progress.doing("backward"):
            future.wait()  # as a collective's work: what waits is C++

    thread = threading.Thread(target=train)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not Standing.of(0, progress, WatchdogConfig()).waits:
            assert time.monotonic() < deadline
    finally:
        future.set_result(None)
        thread.join()
    progress.thread = threading.get_ident()
    assert not Standing.of(0, progress, WatchdogConfig()).waits


def test_a_thread_between_two_lines_tells_where_it_stands():
    progress, lock = Progress(), threading.Lock()

    def train():
        lock.acquire()

    train.__code__ = train.__code__.replace(co_linetable=b"")
    with lock:
        thread = threading.Thread(target=train)
        thread.start()
        while (frame := sys._current_frames()[thread.ident]).f_code is not train.__code__:
            time.sleep(0.01)
        assert frame.f_lineno is None
        progress.thread = thread.ident
        assert not Standing.of(0, progress, WatchdogConfig()).waits
    thread.join()


def test_only_those_who_know_the_token_are_answered():
    async def talk():
        async def answer(request):
            return {"heard": request["word"]}

        listener = listening_socket()
        server = await serve(listener, lambda: "secret", answer)
        here = Whereabouts(0, "here", 1, "127.0.0.1", listener.getsockname()[1], "")
        answers = [await ask(here, token, {"word": 5}) for token in ("secret", "guess", "")]
        server.close()
        await server.wait_closed()
        return [*answers, await ask(here, "secret", {"word": 5})]

    known, guessed, empty, closed = asyncio.run(talk())
    assert known == {"heard": 5}
    assert guessed.gone
    assert empty.gone
    assert closed.gone


@pytest.fixture
def start(tmp_path, clock, leaving):
    """Start a watchdog that looks every few milliseconds and allows 10 s of the clock."""
    started = []

    def start(progress=None, **options):
        left, forced = leaving(), leaving()
        config = WatchdogConfig(timeout_s=0.2, start_timeout_s=10, folder=str(tmp_path / "w"))
        watchdog = Watchdog(config, progress or Progress(clock), left, forced, **options)
        started.append(watchdog.start())
        return watchdog, left, forced

    yield start
    for watchdog in started:
        watchdog.stop()


def test_a_process_that_stands_still_is_ended_with_a_report(tmp_path, capfd, clock, start):
    watchdog, left, forced = start()
    assert current() is watchdog
    clock.spend(12)  # outside of an engine there is no limit
    with watchdog.progress.doing("the data loader"):
        clock.spend(9)
        assert not left.codes
        clock.now += 1
        assert left.wait() == [EXIT_CODE]
    watchdog.stop()
    assert current() is None
    assert not forced.codes
    told = capfd.readouterr().err
    assert "watchdog: rank 0 has not moved for 10 s (wavemare.watchdog allows 10 s)\n" in told
    assert "suspect: rank 0" in told
    assert "the data loader" in (tmp_path / "w" / "rank_00000.txt").read_text()


def test_seconds_in_which_a_process_is_suspended_do_not_count(clock, start):
    watchdog, left, _ = start()
    with watchdog.progress.doing("backward"):
        clock.spend(5)
        clock.now += 100
        clock.let_it_look()
        clock.spend(4)
        assert not left.codes
        clock.spend(2)
        assert left.wait() == [EXIT_CODE]


def test_the_first_look_may_be_late(clock, start):
    progress = Progress(clock)
    with progress.doing("backward"):
        watchdog = start(progress)
        clock.now += 100
        clock.let_it_look()
        clock.spend(5)
        assert not watchdog[1].codes


def test_what_is_pardoned_is_of_one_place(clock):
    progress = Progress(clock)
    with progress.doing("backward"):
        clock.now += 10
        progress.pardon(7)
        assert progress.age_s == 3
        clock.now += 2
        progress.pardon(1)
        assert progress.age_s == 4
        assert Standing.of(0, progress, WatchdogConfig()).age_s == 4
        progress.at("step")  # another place: it has its own time
        clock.now += 3
        assert progress.age_s == 3
        progress.pardon(100)  # not more than there was
        assert progress.age_s == 0


def test_a_report_that_cannot_be_written_does_not_keep_the_run_alive(tmp_path, capfd, clock, start):
    (tmp_path / "w").write_text("")
    watchdog, left, _ = start()
    with watchdog.progress.doing("backward"):
        clock.spend(10)
        assert left.wait() == [EXIT_CODE]
    assert "no report in" in capfd.readouterr().err


def test_a_report_that_never_gets_written_does_not_keep_the_run_alive(tmp_path, clock, start):
    """On a file system that has gone, as here into a pipe that nobody reads."""
    (tmp_path / "w").mkdir()
    os.mkfifo(tmp_path / "w" / "rank_00000.txt")
    watchdog, left, forced = start(last_s=0.1)
    with watchdog.progress.doing("backward"):
        clock.spend(9)
        clock.now += 1
        assert forced.wait() == [EXIT_CODE]
    assert not left.codes
    (tmp_path / "w" / "rank_00000.txt").read_text()


def test_an_engine_that_is_destroyed_does_not_keep_the_run_from_ending(clock, start):
    """As by a script that cleans up when its peer has gone."""
    watchdog, left, _ = start()
    with watchdog.progress.doing("backward"):
        clock.spend(9)
        clock.now += 1
        deadline = time.monotonic() + 60
        while not watchdog.ending:
            assert time.monotonic() < deadline
        watchdog.release()
        assert left.wait() == [EXIT_CODE]


def test_a_look_that_fails_is_not_the_last(clock, start, caplog):
    class FailsOnce(Progress):
        failed = False

        def patience(self, *limits):
            if not self.failed:
                self.failed = True
                raise ZeroDivisionError
            return super().patience(*limits)

    watchdog, left, _ = start(FailsOnce(clock))
    with watchdog.progress.doing("backward"):
        clock.spend(9)
        clock.now += 1
        assert left.wait() == [EXIT_CODE]
    assert "the watchdog could not look" in caplog.text


def threads():
    return [each for each in threading.enumerate() if each.name == "wavemare-watchdog"]


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
    assert len(threads()) == 1
    first.release()
    assert current() is None
    assert not threads()
    after = hold(WatchdogConfig(timeout_s=9))
    assert after is not first
    after.release()
    assert current() is None


def test_an_engine_may_be_collected_by_the_watchdogs_own_thread(clock, start, caplog):
    """It must not wait for itself."""

    class Collects(Progress):
        def patience(self, *limits):
            current().release()
            return super().patience(*limits)

    start(Collects(clock))
    for thread in threads():
        thread.join(60)
    assert not threads()
    assert current() is None
    assert not caplog.records


def test_a_watchdog_starts_and_stops_without_a_trace():
    Watchdog(WatchdogConfig()).start().stop()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        Watchdog(WatchdogConfig()).start().stop()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("turns", range(8))
def test_one_that_ends_as_somebody_calls_says_nothing_of_it(turns):
    """One of these ends when the conversation is prepared, and has not begun."""
    told, listener = [], listening_socket()

    async def answer(request):
        raise AssertionError

    async def end_soon():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(context))
        await serve(listener, lambda: "secret", answer)
        for _ in range(turns):
            await asyncio.sleep(0)

    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])), listener:
        asyncio.run(end_soon())
    assert told == []


class Store(dict):
    def set(self, key, text):
        self[key] = text

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return super().get(key).encode()


def test_the_last_word_of_a_rank_is_found_also_if_it_was_the_stores():
    here = Farewells(Store(), "secret")
    here.say(1, "after step 3")
    here.hear(0, "after step 4")
    assert here.of([0, 1, 2]) == {0: "after step 4", 1: "after step 3"}

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("Broken pipe")

    alone = Farewells(Gone(), "secret")
    alone.say(1, "after step 3")
    alone.hear(0, "after step 4")
    assert alone.of([0, 1]) == {0: "after step 4"}


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, "127.0.0.1"),
        ({"LOCAL_SIZE": "2", "WORLD_SIZE": "2"}, "127.0.0.1"),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, "10.0.0.7"),
        ({"WORLD_SIZE": "4"}, "10.0.0.7"),
        ({"MASTER_ADDR": "127.0.1.1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, "10.0.0.7"),
        ({"MASTER_ADDR": "fd00::1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, "10.0.0.7"),
    ],
)
def test_ranks_of_several_hosts_are_not_told_the_loopback_address(monkeypatch, variables, address):
    for name in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("wavemare.engine.watchdog.peers.own_address", lambda _: "10.0.0.7")
    assert reachable_address() == address
