# SPDX-License-Identifier: Apache-2.0
"""Who holds up a run: the judgement, what ranks tell of themselves, how watchdogs ask."""

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from wavemare.engine.watchdog import watcher
from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.farewell import Farewells
from wavemare.engine.watchdog.peers import ask, listening_socket, reachable_address, serve
from wavemare.engine.watchdog.progress import Followed, Progress
from wavemare.engine.watchdog.report import report_text
from wavemare.engine.watchdog.standing import Absent, Standing, Whereabouts
from wavemare.engine.watchdog.verdict import judge
from wavemare.engine.watchdog.watcher import EXIT_CODE, Watchdog, current
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
        deadline = time.monotonic() + 20
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


def test_a_socket_that_never_answers_is_told_from_one_that_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        where = Whereabouts(1, "there", 2, "127.0.0.1", deaf.getsockname()[1], "")
        started = time.monotonic()
        assert not asyncio.run(ask(where, "secret", {})).gone
        assert time.monotonic() - started < 10


def test_a_process_that_stands_still_is_ended_with_a_report(tmp_path, capfd):
    left = threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        left.set()

    progress = Progress()
    config = WatchdogConfig(timeout_s=0.2, start_timeout_s=0.2, folder=str(tmp_path / "w"))
    watchdog = Watchdog(config, progress, leave).start()
    try:
        assert current() is watchdog
        assert not left.wait(0.6)  # outside of an engine there is no hurry
        with progress.doing("the data loader"):
            assert left.wait(30)
    finally:
        watchdog.stop()
    assert codes == [EXIT_CODE]
    assert "suspect: rank 0" in capfd.readouterr().err
    assert "the data loader" in (tmp_path / "w" / "rank_00000.txt").read_text()
    assert current() is None


def test_a_report_that_cannot_be_written_does_not_keep_the_run_alive(tmp_path, capfd):
    left = threading.Event()
    (tmp_path / "file").write_text("")
    progress = Progress()
    config = WatchdogConfig(timeout_s=0.1, start_timeout_s=0.1, folder=str(tmp_path / "file" / "w"))
    watchdog = Watchdog(config, progress, lambda code: left.set()).start()
    with progress.doing("backward"):
        assert left.wait(30)
    watchdog.stop()
    assert "no report in" in capfd.readouterr().err


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_a_watchdog_starts_and_stops_200_times_without_a_trace():
    Watchdog(WatchdogConfig()).start().stop()
    threads, files = threading.active_count(), open_files()
    for _ in range(200):
        Watchdog(WatchdogConfig()).start().stop()
    assert threading.active_count() == threads
    assert open_files() == files
    assert current() is None


def test_one_that_ends_in_a_conversation_says_nothing_of_it():
    program = """
import socket, time
from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.watcher import Watchdog
watchdog = Watchdog(WatchdogConfig()).start()
caller = socket.create_connection(("127.0.0.1", watchdog._me.port))
time.sleep(0.3)  # until it is listened to
watchdog.stop()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    for words in ("Traceback", "Warning", "Task"):
        assert words not in ended.stderr


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


class Ended:
    """Takes the place of the end of the process."""

    def __init__(self):
        self.codes = []
        self.event = threading.Event()

    def __call__(self, code):
        self.codes.append(code)
        self.event.set()


def test_seconds_in_which_a_process_is_suspended_do_not_count(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress()
    with progress.doing("backward"):
        now = 1010.0
        progress.pardon(7)
        assert progress.age_s == 3
        now = 1012.0
        progress.pardon(1)
        assert progress.age_s == 4
        assert Standing.of(0, progress, WatchdogConfig()).age_s == 4
        progress.at("step")  # another place: it has its own time
        now = 1015.0
        assert progress.age_s == 3
        progress.pardon(100)  # not more than there was
        assert progress.age_s == 0


SUSPENDED = """
from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.progress import Progress
from wavemare.engine.watchdog.watcher import Watchdog

progress = Progress()
Watchdog(WatchdogConfig(timeout_s=4, start_timeout_s=4), progress).start()
with progress.doing("backward"):
    print("in", flush=True)
    input()  # still in the same place when it goes on
"""


def test_a_job_that_was_suspended_goes_on(tmp_path):
    """All its ranks at once, by a scheduler or a machine's host."""
    words = [sys.executable, "-c", SUSPENDED]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, cwd=tmp_path) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        time.sleep(2)  # in which the watchdog would have ended it
        _, errors = process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    assert b"watchdog" not in errors


def test_a_process_suspended_before_the_first_look_goes_on(tmp_path, monkeypatch):
    async def serve_late(*arguments):
        time.sleep(3)  # as a process that gets no time at all
        return await serve(*arguments)

    monkeypatch.setattr(watcher, "serve", serve_late)
    monkeypatch.setattr(watcher, "_GRACE_S", 0.0)
    ended, progress = Ended(), Progress()
    config = WatchdogConfig(timeout_s=2, start_timeout_s=2, folder=str(tmp_path))
    with progress.doing("backward"):
        watchdog = Watchdog(config, progress, ended, ended).start()
        assert not ended.event.wait(4)
        assert ended.event.wait(20)  # it was pardoned once
    watchdog.stop()


def silent_rank(tmp_path):
    """Return a watchdog that is stuck, what its end is, and what the other rank answers."""
    ended, answers = Ended(), []
    progress = Progress()
    config = WatchdogConfig(timeout_s=0.01, start_timeout_s=0.01, folder=str(tmp_path))
    watchdog = Watchdog(config, progress, ended)
    watchdog._ranks = RANKS[:2]

    async def inquire():
        return answers.pop(0)

    async def end(*_):
        ended(EXIT_CODE)

    watchdog._inquire, watchdog._end = inquire, end
    return watchdog, ended, answers


def test_one_missing_answer_of_a_rank_that_moved_is_no_proof(tmp_path):
    watchdog, ended, answers = silent_rank(tmp_path)
    moving = ([standing(1, age_s=0.0, patience_s=1000.0)], [])
    silent = ([], [Absent(RANKS[1], gone=False)])
    gone = ([], [Absent(RANKS[1], gone=True)])

    async def look():
        await asyncio.sleep(0.02)
        await watchdog._look()

    with watchdog.progress.doing("backward"):
        for answer, ends in ((moving, False), (silent, False), (gone, True)):
            answers.append(answer)
            asyncio.run(look())
            assert bool(ended.codes) == ends
        ended.codes.clear()
        watchdog._moves_until.clear()
        answers.append(silent)  # and never an answer before
        asyncio.run(look())
        assert ended.codes
    watchdog.start().stop()


def test_a_report_that_never_gets_written_does_not_keep_the_run_alive(tmp_path, monkeypatch):
    """On a file system that has gone, as here into a pipe that nobody reads."""
    monkeypatch.setattr("wavemare.engine.watchdog.watcher._LAST_S", 0.2)
    os.mkfifo(tmp_path / "rank_00000.txt")
    progress, left, forced = Progress(), Ended(), Ended()
    config = WatchdogConfig(timeout_s=0.1, start_timeout_s=0.1, folder=str(tmp_path))
    watchdog = Watchdog(config, progress, left, forced).start()
    try:
        with progress.doing("backward"):
            assert forced.event.wait(30)
        assert forced.codes == [EXIT_CODE]
        assert not left.codes
    finally:
        (tmp_path / "rank_00000.txt").read_text()
        watchdog.stop()


class Broken(Exception):
    """Nothing that anybody expects."""


def test_the_run_ends_with_its_report_though_the_others_cannot_be_told(
    tmp_path, monkeypatch, capfd
):
    """Also where another rank, which holds nobody up, was to print it."""

    async def ask_all(ranks, token, request):
        if request["ask"] == "end":
            raise Broken
        return [standing(1).to_json()]

    monkeypatch.setattr("wavemare.engine.watchdog.watcher.ask_all", ask_all)
    progress, left, forced = Progress(), Ended(), Ended()
    config = WatchdogConfig(timeout_s=0.1, start_timeout_s=0.1, folder=str(tmp_path))
    watchdog = Watchdog(config, progress, left, forced)
    watchdog._ranks = [watchdog._me, RANKS[1]]
    watchdog.start()
    with progress.doing("backward"):
        assert left.event.wait(30)
    watchdog.stop()
    assert left.codes == [EXIT_CODE]
    assert not forced.codes
    assert "suspect: rank 0" in capfd.readouterr().err
    assert (tmp_path / "rank_00000.txt").exists()


@pytest.mark.parametrize("told", [False, True], ids=["its own end", "told by another"])
def test_one_that_has_begun_to_end_ends_whatever_fails(tmp_path, monkeypatch, told):
    def fails(*_):
        raise Broken

    monkeypatch.setattr("wavemare.engine.watchdog.watcher._LAST_S", 0.2)
    monkeypatch.setattr("wavemare.engine.watchdog.watcher.write_report", fails)
    progress, left, forced = Progress(), Ended(), Ended()
    config = WatchdogConfig(timeout_s=0.1, start_timeout_s=0.1, folder=str(tmp_path))
    watchdog = Watchdog(config, progress, left, forced).start()
    if told:
        watchdog._token = "secret"
        asyncio.run(ask(watchdog._me, "secret", {"ask": "end"}))  # without its summary, too
        assert forced.event.wait(30)
    else:
        with progress.doing("backward"):
            assert forced.event.wait(30)
    assert watchdog.ending
    assert watchdog._thread.is_alive()
    watchdog.stop()
    assert forced.codes == [EXIT_CODE]
    assert not left.codes


def test_an_engine_that_is_destroyed_does_not_keep_the_run_from_ending(tmp_path):
    """As by a script that cleans up when a peer has gone, which the watchdog has ended."""
    left = Ended()
    config = WatchdogConfig(folder=str(tmp_path))
    watchdog = Watchdog(config, Progress(), left).start()
    watchdog._token = "secret"
    asyncio.run(ask(watchdog._me, "secret", {"ask": "end", "summary": "stuck", "speaker": 5}))
    watchdog.release()
    assert current() is watchdog
    assert left.event.wait(30)
    watchdog.stop()
    assert left.codes == [EXIT_CODE]


def test_a_look_that_fails_is_not_the_last(tmp_path, monkeypatch):
    tries = []

    def fails_at_first(*_):
        tries.append(1)
        if len(tries) == 1:
            raise Broken
        return judge(*_)

    monkeypatch.setattr("wavemare.engine.watchdog.watcher.judge", fails_at_first)
    progress, left = Progress(), Ended()
    config = WatchdogConfig(timeout_s=0.1, start_timeout_s=0.1, folder=str(tmp_path))
    watchdog = Watchdog(config, progress, left).start()
    with progress.doing("backward"):
        assert left.event.wait(30)
    watchdog.stop()
    assert left.codes == [EXIT_CODE]


def test_a_forked_child_does_not_answer_for_its_parent():
    """Workers of a data loader outlive a rank that is killed."""
    watchdog = Watchdog(WatchdogConfig()).start()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    watchdog.stop()
    try:
        assert child.is_alive()
        where = replace(RANKS[1], port=watchdog._me.port)
        assert asyncio.run(ask(where, "", {})).gone
    finally:
        child.kill()
        child.join()


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
