# SPDX-License-Identifier: Apache-2.0
"""The watchdog of a process: a thread that notices when ranks only wait, and ends the run."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from wavemare.comm.waits import Call, Wait, told_to_end
from wavemare.engine.config.sections import WatchdogConfig
from wavemare.engine.health.board import Board
from wavemare.engine.health.rank_status import (
    Diagnosis,
    RankStatus,
    diagnose,
    diagnose_absence,
    write_report,
)
from wavemare.engine.launch.group import environment_rank, environment_world_size, exit_now
from wavemare.engine.observe.progress import PROGRESS, Progress
from wavemare.engine.seams import mark_waits
from wavemare.files import process_state, this_machine

logger = logging.getLogger("wavemare")

EXIT_CODE = 124
"""Exit code of a run that the watchdog ends; that of ``timeout``."""

_TICKS = 20
_PAUSE_S = 1.0
"""The most seconds that a tick may be late; in the rest this process was suspended."""
_KILLED_S = 5.0
"""Seconds of waiting after which a rank of this machine that was killed ends the run."""
_LOOK_S, _TURN_S = 5.0, 0.05
"""Seconds between two looks at all ranks; and for each rank, so that the store bears them all."""
_STORE_S = 3.0
"""Seconds that the store has for an answer, where somebody waits for it."""
_GRACE_S = 1.0
"""Seconds, beside two ticks, in which the others hear of the end, before a launcher ends them."""
_SEEN_S = 3.0
"""Seconds in which a launcher sees the exit code of a rank; the slowest looks once a second."""
_LAST_S = 10.0
"""Seconds after which the process ends though its report is not written: a dead file system."""
_RUNS = ("R", "S", "D")
"""States of a process that is not stopped and has not ended."""
_POLL_S = 0.1
_SHOWN = 3
"""Ranks in the line that says who waits."""

_running: list[Watchdog] = []


def current() -> Watchdog | None:
    """Return the watchdog of this process, if one is running."""
    return _running[-1] if _running else None


def _limit_collectives(limits: dict[str, timedelta], seconds: float | None) -> None:
    """Let collectives over gloo fail after so many seconds; None: after the groups' own limits."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    cpu = torch.device("cpu")
    for group, name in list(distributed_c10d._world.pg_names.items()):
        backend = group._get_backend(cpu) if cpu in group._device_types else None
        if isinstance(backend, distributed_c10d.ProcessGroupGloo):
            own = limits.setdefault(name, backend.options._timeout)
            backend._set_default_timeout(own if seconds is None else timedelta(seconds=seconds))


def _kill_stopped(pids: Sequence[int]) -> None:
    """Kill processes for which launchers would wait, but first let these see our exit code."""
    if pids:
        kill = f"(sleep {_SEEN_S:g}; kill -KILL {' '.join(map(str, pids))}) &"
        null = subprocess.DEVNULL
        files: dict[str, Any] = {"stdin": null, "stdout": null, "stderr": null}
        subprocess.run(["/bin/sh", "-c", kill], check=False, start_new_session=True, **files)


def acquire(config: WatchdogConfig) -> Watchdog:
    """Return this process's watchdog, started if none runs; the last `Watchdog.release` stops it.

    All engines of a process share it, with the settings of the first.
    """
    running = current()
    if running is None:
        return Watchdog(config).start()
    running._holders += 1
    if config != running.config and running._me.rank == 0:
        logger.warning(
            "wavemare.watchdog: %s does not count: an earlier engine has started the watchdog of "
            "this process, with %s",
            config,
            running.config,
        )
    return running


os.register_at_fork(after_in_child=_running.clear)


class Watchdog:
    """Watches this process, and hears what the other ranks do before it ends the run.

    Only marked waits (`wavemare.comm.waits`) count: a process that computes, loads or writes is
    never ended. About once a second each rank writes on the `Board` what it does, and reads there
    whether the run is to end. One that has waited for long looks at all ranks. If all have waited
    for ``timeout_s``, or have gone, it writes why on the board: each rank that waits writes a
    report, one prints the reason, and all end with `EXIT_CODE`. Else one line says who waits for
    whom. If the board does not answer, each rank decides alone, and blames the one that holds it.

    Args:
        config: The section ``watchdog``.
        progress: Of this process.
        leave: Ends the process; for tests.
        force: Ends it in any case; for tests.
        machine: Of `this_machine`; for tests.
        last_s: Seconds after which ``force`` is called.
        clock: Returns seconds.
        longest_tick_s: The most seconds between two looks at this process.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        progress: Progress = PROGRESS,
        leave: Callable[[int], Any] = exit_now,
        force: Callable[[int], Any] = os._exit,
        machine: str | None = None,
        last_s: float = _LAST_S,
        clock: Callable[[], float] = time.monotonic,
        longest_tick_s: float = 1.0,
    ) -> None:
        self.config = config
        self.progress = progress
        self.ending = False
        """Whether it is ending this process; other errors are consequences then."""
        self._leave, self._clock = leave, clock
        self._last = threading.Timer(last_s, force, (EXIT_CODE,))
        self._last.daemon = True
        self._tick_s = min(config.timeout_s / _TICKS, longest_tick_s)
        machine = this_machine() if machine is None else machine
        self._me = RankStatus(environment_rank(), socket.gethostname(), os.getpid(), machine)
        self._beat = itertools.count(1)
        self._is_alone = environment_world_size() == 1
        self._board: Board | None = None
        self._wait: Wait | None = None
        self._waited_s = self._printed_s = 0.0  # in this wait
        # Seconds in which this process was not suspended: now, of the last answer, of a look:
        self._time_s = self._answered_s = self._next_look_s = 0.0
        self._turns_s = 1.0  # between two looks
        self._beats: dict[int, tuple[int, float]] = {}  # of each rank, and since when
        self._now = clock()
        self._limits: dict[str, timedelta] = {}
        self._holders = 1
        self._word, self._lingers = "", True
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="wavemare-watchdog", daemon=True)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> Watchdog:
        """Begin to watch this process alone, in place of another watchdog."""
        for other in list(_running):
            other.stop()
        _running.append(self)
        self._now = self._clock()
        mark_waits()
        self._thread.start()
        atexit.register(self._at_exit)
        return self

    def meet(self, group: tuple[Any, int, int] | None = None) -> None:
        """Begin to hear the watchdogs of the other ranks; every `initialize` calls it.

        Args:
            group: Store, rank and number of ranks; None for the default process group.
        """
        # No collective: NCCL would need a device, which is not chosen yet.
        store, rank, size = group or (
            distributed_c10d._get_default_store(),
            distributed.get_rank(),
            distributed.get_world_size(),
        )
        # Where MPI starts the ranks, the variables are set by now.
        self._me, self._is_alone = replace(self._me, rank=rank), size == 1
        before, self._board = self._board, None  # others may have left the one before
        if size > 1:
            board = Board(store, self._status(), size)
            self._turns_s = min(max(_LOOK_S, size * _TURN_S), self.config.timeout_s / 4)
            self._beats = {each.rank: (each.beat, self._time_s) for each in board.ranks}
            self._answered_s, self._board = self._time_s, board
        if before is not None:
            Call(partial(before.leave, self._status())).wait(_STORE_S)
        self.extend_deadline()

    def extend_deadline(self) -> None:
        """Let no collective fail because a peer computes for long: this watchdog sees to it."""
        _limit_collectives(self._limits, self.config.collective_timeout_s)

    def release(self, *, notify: bool = True) -> None:
        """Give back what `acquire` has returned; the last call stops it.

        Args:
            notify: Whether this rank ends in good order, which it tells the others.
        """
        self._holders -= 1
        if self._holders <= 0 and not self.ending:
            self.stop(notify=notify)

    def stop(self, code: int = 0, *, notify: bool = True) -> None:
        """Stop watching, whoever holds it.

        Args:
            code: Exit code of this process.
            notify: Whether to tell the other ranks that this one ends by itself.
        """
        if self in _running:
            _running.remove(self)
            _limit_collectives(self._limits, None)
        atexit.unregister(self._at_exit)
        if notify:
            with_code = f" with exit code {code}" if code else ""
            self._word = f"after step {self.progress.step}{with_code}"
            # The launcher that ends this process because another has failed ends all of them.
            self._lingers = not (code and told_to_end.is_set())
        self._stopping.set()
        # A thread of its own may collect an engine, and so come here.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * _STORE_S)

    def _at_exit(self) -> None:
        if self.ending:
            self._thread.join(_LAST_S)  # it ends the process; a shutdown might hang
        # The interpreter takes seconds to end, in which nobody would say anything.
        self.stop()

    # --- watching -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.ending and not self._stopping.wait(self._tick_s):
            try:
                self._count()
                self._look()
            except Exception:
                logger.exception("the watchdog could not look")  # and goes on
        if self._board is not None and not self.ending:
            linger_s = 2 * self._tick_s if self._word and self._lingers else 0.0
            self._board.leave(replace(self._status(), left=self._word), linger_s)

    def _count(self) -> None:
        """Count seconds, but not those in which this process was suspended."""
        now, wait = self._clock(), self.progress.wait
        passed_s = min(now - self._now, self._tick_s + _PAUSE_S)
        self._now, self._time_s = now, self._time_s + passed_s
        if wait is self._wait:
            self._waited_s += passed_s if wait is not None else 0.0
            return
        self._wait, self._waited_s, self._printed_s = wait, 0.0, 0.0
        turn_s = self._me.rank * _TURN_S % self._turns_s
        self._next_look_s = self._time_s + self.config.timeout_s / 2 + turn_s

    def _status(self) -> RankStatus:
        waited_s = self._waited_s if self.progress.wait is self._wait else 0.0
        return self._me.at(self.progress, waited_s, next(self._beat))

    def _look(self) -> None:
        """Say what this rank does, and hear what others do; judge whether the run goes on."""
        board, half_s = self._board, self.config.timeout_s / 2
        if board is None or not board.is_open:
            return self._judge([self._status()])
        me, host = self._status(), board.ranks[0]
        looks = self._wait is not None and self._time_s >= self._next_look_s
        if self._waited_s >= min(_KILLED_S, half_s):
            looks |= any(board.has_ended(each) and not each.left for each in board.ranks)
        heard = board.hear(me, self._tick_s / 2, everyone=looks)
        if heard is not None:
            self._answered_s = self._time_s
            decision, ranks = heard
            if decision and self._wait is not None:  # one that computes ends when it waits
                self._end(decision)
            elif len(ranks) > 1:
                self._next_look_s = self._time_s + self._turns_s
                self._judge([me if each.rank == me.rank else self._see(each) for each in ranks])
        elif board.has_ended(host) or self._time_s - self._answered_s >= half_s:
            # The store is lost, and mostly its host: of the others nothing is known.
            is_silent, ended = not self._runs_here(host), board.has_ended(host)
            host = replace(host, late=True, silent=is_silent, ended=ended)
            self._judge([me, host] if me.rank else [me], store_answers=False)
        return None

    def _see(self, rank: RankStatus) -> RankStatus:
        """Return what another rank says, and whether that is new."""
        before, since_s = self._beats[rank.rank]
        is_new = rank.beat != before
        since_s = self._time_s if is_new else since_s
        self._beats[rank.rank] = rank.beat, since_s
        is_silent = self._time_s - since_s >= self.config.timeout_s / 2
        return replace(rank, late=not is_new, silent=is_silent and not self._runs_here(rank))

    def _runs_here(self, rank: RankStatus) -> bool:
        """Whether a rank runs on this machine: if silent, it does not give way to its watchdog."""
        return rank.machine == self._me.machine and process_state(rank.pid) in _RUNS

    def _judge(self, ranks: list[RankStatus], *, store_answers: bool = True) -> None:
        """End the run if it does not go on, or tell who waits.

        Args:
            ranks: What is known of the ranks, this one too.
            store_answers: Else each rank judges, and ends, alone.
        """
        limit = self.config.timeout_s
        # Without the store nobody hears a last word.
        killed = [each for each in ranks if each.ended and not each.left and store_answers]
        if killed and self._waited_s >= min(_KILLED_S, limit / 2):
            why = f", and {killed[0].name} has ended"
            self._decide(diagnose_absence(killed), ranks, why, store_answers)
        elif self._waited_s >= limit:
            diagnosis = diagnose(ranks, limit)
            if diagnosis is not None and (len(ranks) > 1 or self._is_alone):
                why = f" (wavemare.watchdog.timeout_s is {limit:g}), and no rank makes progress"
                self._decide(diagnosis, ranks, why, store_answers)
            elif not any(each.waited_s >= limit and each.rank < self._me.rank for each in ranks):
                self._print_wait(ranks)

    def _print_wait(self, ranks: Sequence[RankStatus]) -> None:
        """Print who waits and who does not: at ``timeout_s``, then at each doubling."""
        if self._waited_s < 2 * self._printed_s:
            return
        self._printed_s = self._waited_s
        own = [each for each in ranks if each.rank == self._me.rank]
        others = [each for each in ranks if each not in own and not each.waits]
        line = "; ".join(f"{each.name} {each}" for each in own + others[:_SHOWN])
        print(f"watchdog: {line}; the run goes on", file=sys.__stderr__, flush=True)

    # --- the end --------------------------------------------------------------------------------

    def _decide(
        self, diagnosis: Diagnosis, ranks: Sequence[RankStatus], why: str, store_answers: bool
    ) -> None:
        """End the run, unless another rank has ended it for another reason."""
        headline = f"rank {self._me.rank} has waited for {self._waited_s:.0f} s{why}"
        summary = diagnosis.summary(ranks, headline, self._folder)
        suspects, board = diagnosis.suspects, self._board
        waiting = [each.rank for each in ranks if each.waits and each.rank not in suspects]
        decision = json.dumps([summary, min(waiting or [self._me.rank]), suspects])
        if board is not None and store_answers:
            decision = board.decide(decision, _STORE_S)
        elif board is not None and self._first_here(board) != self._me.rank:
            own = [line for each in ranks if each.rank == self._me.rank for line in each.lines]
            decision = json.dumps(["\n".join([summary.splitlines()[0], *own]), self._me.rank, []])
        self._end(decision)

    def _first_here(self, board: Board) -> int:
        """Return the first rank of this machine that runs: without the store, it speaks for all."""
        return min(each.rank for each in board.ranks if self._runs_here(each))

    def _end(self, decision: str) -> None:
        """End this process as a rank has decided, whatever fails from here on."""
        with self._lock:
            if self.ending or self._stopping.is_set():
                return
            self._last.start()
            self.ending = True
        summary, speaker, suspects = json.loads(decision)
        problem = self._write_report(summary.splitlines()[0])
        lines = [*([summary] if speaker == self._me.rank else []), *([problem] if problem else [])]
        if lines:
            print("\n".join(lines), file=sys.__stderr__, flush=True)
        if self._board is not None:
            time.sleep(2 * self._tick_s + _GRACE_S)
            here = [each for each in self._board.ranks if each.machine == self._me.machine]
            numbers = [each.pid for each in here if each.rank in suspects]
            _kill_stopped([n for n in numbers if process_state(n) in ("T", "t")])
        self._leave(EXIT_CODE)
        self._last.cancel()

    @property
    def _folder(self) -> str:
        return str(Path(self.config.folder).resolve())

    def _write_report(self, headline: str) -> str | None:
        return write_report(self._folder, self._status(), self.progress, headline)

    def explain_loss(self) -> str | None:
        """Say which ranks have gone, if any have, and write this rank's report.

        For a rank whose collective has failed because a peer has gone. A rank of another machine
        has gone if it says nothing for some seconds.
        """
        board, me = self._board, self._status()
        if board is None or not board.is_open:
            return None
        beats: dict[int, int] = {}
        for pause_s in (_POLL_S, _STORE_S):
            time.sleep(pause_s)  # a process that was killed ends within a moment
            ranks = board.ask(me, _STORE_S)
            if ranks is None:  # the store has gone; the first rank, mostly with it
                host = replace(board.ranks[0], ended=board.has_ended(board.ranks[0]))
                # It has told why it has ended; or another rank of this machine tells it.
                if host.left or not host.ended or self._first_here(board) != me.rank:
                    return None
                ranks = [host, me]
            late = [each.rank for each in ranks if each.beat == beats.get(each.rank)]
            ranks = [
                replace(each, silent=each.rank in late and not self._runs_here(each))
                for each in ranks
            ]
            if gone := [each for each in ranks if each.absence]:
                break
            beats = {each.rank: each.beat for each in ranks}
        else:
            return None
        headline = f"rank {me.rank} has lost rank {', '.join(str(each.rank) for each in gone)}"
        if (broken := self.progress.broken) is not None:
            headline += f" in {broken}, step {self.progress.step}"
        self._write_report(headline)
        return diagnose_absence(gone).summary(ranks, headline, self._folder)
