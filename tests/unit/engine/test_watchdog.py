# SPDX-License-Identifier: Apache-2.0
"""One rank's watchdog: whom it blames, what it reports, when it ends the process."""

import os
import threading
from dataclasses import replace

import pytest

from wavemare.comm.waits import joining, waiting
from wavemare.engine.config.sections import WatchdogConfig
from wavemare.engine.health.rank_status import RankStatus, diagnose, write_report
from wavemare.engine.health.watchdog import EXIT_CODE, Watchdog, acquire, current
from wavemare.engine.observe.progress import Progress
from wavemare.pipeline.plan.plan import Action, Kind

RANKS = [RankStatus(r, f"node{r}", 100 + r, f"{r}") for r in range(3)]
STUCK = {"what": "backward", "wait": "all_reduce", "waited_s": 9.0, "step": 4}
SILENT, KILLED = {"silent": True}, {"ended": True}
LEFT = {"ended": True, "left": "after step 3"}


def status(rank, **changes):
    return replace(RANKS[rank], **STUCK | changes)


@pytest.mark.parametrize(
    ("others", "suspects", "words"),
    [
        ([SILENT], (1,), "does not answer"),
        ([KILLED], (1,), "without a word"),
        ([LEFT], (1,), "by itself, after step 3"),
        ([{"step": 3}, {}], (1,), "in step 3"),
        ([{}, {}], (), "all ranks wait"),
    ],
)
def test_the_rank_to_blame_is_named(others, suspects, words):
    ranks = [status(0), *(status(1 + n, **other) for n, other in enumerate(others))]
    diagnosis = diagnose(ranks, 5)
    assert diagnosis.suspects == suspects
    assert words in diagnosis.reason
    summary = diagnosis.summary(ranks, "nothing moves", "/runs/one")
    assert summary.startswith("watchdog: nothing moves\nsuspect: ")
    for rank in suspects:
        assert RANKS[rank].name in summary.splitlines()[1]
    assert "/runs/one/rank_*.txt" in summary


@pytest.mark.parametrize("absence", [{}, SILENT, KILLED, LEFT])
@pytest.mark.parametrize("other", [{"wait": ""}, {"waited_s": 4.9}, {"late": True}])
def test_a_run_goes_on_while_a_rank_may_compute_or_waits_shortly(other, absence):
    assert diagnose([status(0), status(1, **other), status(2, **absence)], 5) is None


def test_a_report_shows_the_plan_around_the_action(tmp_path):
    progress, peers = Progress(), {Action(Kind.SEND_ACTIVATION, 1, 0): 2}
    kinds = (Kind.RECV_ACTIVATION, Kind.FORWARD, Kind.SEND_ACTIVATION)
    progress.begin_actions([Action(kind, 1, 0) for kind in kinds], peers.get)
    progress.at_action(1)
    assert RANKS[1].at(progress, 0.0, 1).peer is None
    progress.at_action(2)
    here = RANKS[1].at(progress, 0.0, 1)
    assert here.plan == "1RA0 1F0 [1SA0]"
    assert here.peer == 2
    assert write_report(str(tmp_path), here, progress, "nothing moves") is None
    report = (tmp_path / "rank_00001.txt").read_text()
    assert "[1SA0]" in report
    assert "last finished: forward of micro-batch 0 (1F0)" in report
    assert "test_a_report_shows_the_plan" in report  # the stack


def test_after_an_error_a_rank_says_where_it_was():
    progress = Progress()
    with pytest.raises(ValueError, match="own"), progress.doing("backward"):
        raise ValueError("own")
    failed = RANKS[0].at(progress, 0.0, 1)
    assert "computes in the script's own code, after an error in backward, step 0" in str(failed)
    progress.begin_step(1)
    assert "after an error" not in str(RANKS[0].at(progress, 0.0, 2))


def test_only_marked_waits_of_the_thread_that_trains_or_that_it_joins_count():
    progress, began, end = Progress(), threading.Event(), threading.Event()

    def collective():
        with waiting("a peer"), waiting("its message"):
            began.set()
            end.wait()

    worker, other = threading.Thread(target=collective), threading.Thread(target=end.wait)
    worker.start()
    other.start()
    began.wait()
    assert progress.wait is None
    with joining(worker):
        with joining(other):  # in a finaliser that the garbage collector runs
            assert progress.wait is None
        assert progress.wait.what == "a peer"
        end.set()
        worker.join()
        assert progress.wait is None
    with waiting("another"):
        assert progress.wait.what == "another"
    assert progress.wait is None


@pytest.fixture
def start(tmp_path, clock, leaving):
    """Start a watchdog that looks every few milliseconds and allows 10 s of the clock."""
    started = []

    def start(progress=None, **options):
        left, forced = leaving(), leaving()
        config = WatchdogConfig(timeout_s=10, folder=str(tmp_path / "w"))
        options = {"clock": clock, "longest_tick_s": 0.005, **options}
        watchdog = Watchdog(config, progress or Progress(), left, forced, **options)
        started.append(watchdog.start())
        return watchdog, left, forced

    yield start
    for watchdog in started:
        watchdog.stop()


def test_a_process_that_only_waits_is_ended_with_a_report(tmp_path, capfd, clock, start):
    watchdog, left, forced = start()
    assert current() is watchdog
    with watchdog.progress.doing("step"):
        clock.spend(25)  # it computes
        assert not left.codes
        for _ in range(3):
            with waiting("a message"):
                clock.spend(8)
        assert not left.codes
        with waiting("a message that never comes"):
            clock.spend(12)
            assert left.wait() == [EXIT_CODE]
    watchdog.stop()
    assert current() is None
    assert not forced.codes
    told = capfd.readouterr().err
    assert "watchdog: rank 0 has waited for 1" in told
    assert "(wavemare.watchdog.timeout_s is 10)" in told
    assert "suspect: no single rank" in told
    report = (tmp_path / "w" / "rank_00000.txt").read_text()
    assert "waits in step (a message that never comes) for" in report


def test_seconds_in_which_a_process_is_suspended_do_not_count(clock, start):
    _, left, _ = start()
    with waiting("a message"):
        clock.spend(5)
        clock.now += 100
        clock.let_it_look()
        clock.spend(2)
        assert not left.codes
        clock.spend(5)
        assert left.wait() == [EXIT_CODE]


def test_before_it_has_met_the_others_a_rank_only_tells(monkeypatch, clock, start, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, left, _ = start()
    with waiting("the lock /x/lock"):
        clock.spend(45)
    assert not left.codes
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3  # after 10, 20 and 40 s
    assert "(the lock /x/lock) for 10 s" in lines[0]
    assert lines[0].endswith("the run goes on")


def test_a_report_that_cannot_be_written_does_not_keep_the_run_alive(tmp_path, capfd, clock, start):
    (tmp_path / "w").write_text("")
    _, left, _ = start()
    with waiting("a message"):
        clock.spend(11)
        assert left.wait() == [EXIT_CODE]
    assert "no report in" in capfd.readouterr().err


def test_a_report_that_never_gets_written_does_not_keep_the_run_alive(tmp_path, clock, start):
    """On a file system that has gone, as here into a pipe that nobody reads."""
    (tmp_path / "w").mkdir()
    os.mkfifo(tmp_path / "w" / "rank_00000.txt")
    _, left, forced = start(last_s=0.1)
    with waiting("a message"):
        clock.spend_until(lambda: forced.codes)
    assert not left.codes
    (tmp_path / "w" / "rank_00000.txt").read_text()


def test_an_engine_that_is_destroyed_does_not_keep_the_run_from_ending(clock, start):
    """As by a script that cleans up when its peer has gone."""
    watchdog, left, _ = start()
    with waiting("a message"):
        clock.spend_until(lambda: watchdog.ending)
        watchdog.release()
        assert left.wait() == [EXIT_CODE]


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("wavemare-watchdog")]


def test_engines_share_the_watchdog_until_the_last_has_gone(caplog):
    first = acquire(WatchdogConfig(timeout_s=60))
    second = acquire(WatchdogConfig(timeout_s=60))
    assert not caplog.records
    assert second is first
    third = acquire(WatchdogConfig(timeout_s=9, folder="other"))
    assert third is first
    assert first.config.timeout_s == 60
    (told,) = [record.getMessage() for record in caplog.records]
    assert "timeout_s=9.0 folder='other' does not count" in told
    assert "with enabled=True timeout_s=60.0" in told
    third.release()
    second.release(notify=False)  # its engine could not be built
    assert current() is first
    assert len(threads()) == 1
    first.release()
    assert current() is None
    assert not threads()
    after = acquire(WatchdogConfig(timeout_s=9))
    assert after is not first
    after.release()
    assert current() is None


def test_an_engine_may_be_collected_by_the_watchdogs_own_thread(clock, start, caplog):
    """It must not wait for itself."""

    class Collects(Progress):
        @property
        def wait(self):
            if (watchdog := current()) is not None:
                watchdog.release()

    start(Collects())
    for thread in threads():
        thread.join(300)
    assert not threads()
    assert current() is None
    assert not caplog.records
