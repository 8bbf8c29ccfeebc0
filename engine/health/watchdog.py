# SPDX-License-Identifier: Apache-2.0
"""The watchdog of a process: a thread that notices when ranks only wait, and ends the run."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from wavemare.comm.waits import Wait
from wavemare.engine.config.sections import WatchdogConfig
from wavemare.engine.health.rank_status import (
    LOOPBACK,
    Diagnosis,
    PeerAddress,
    RankStatus,
    Server,
    UnreachablePeer,
    ask,
    ask_all,
    diagnose,
    diagnose_unreachable,
    reachable_address,
    write_report,
)
from wavemare.engine.launch.group import environment_rank, environment_world_size, exit_now, meet
from wavemare.engine.observe.progress import PROGRESS, Progress
from wavemare.engine.seams import mark_waits
from wavemare.files import process_has_ended, process_state, this_machine

logger = logging.getLogger("wavemare")

EXIT_CODE = 124
"""Exit code of a run that the watchdog ends; that of ``timeout``."""

_TICKS = 20
_PAUSE_S = 1.0
"""The most seconds that a tick may be late; in the rest this process was suspended."""
_NEXT_S = 5.0
"""Seconds of waiting before a rank probes the next one, and between its probes."""
_TURN_S, _LONGEST_TURN_S = 0.05, 2.0
"""Seconds that each rank waits for those before it: the first one asks for all."""
_GRACE_S = 1.0
"""Seconds in which the other ranks write reports, before a launcher ends them."""
_LAST_S = 10.0
"""Seconds after which the process ends though its report is not written: a dead file system."""
_BLOCKED_S = 1.0
"""Seconds after which a host that refused a connection is asked again: it may be blocked."""
_FORGET_S = 15.0
"""Seconds after which a missing answer no longer counts: the rank was not asked since."""
_RUNS = ("R", "S", "D")
"""States of a process that is not stopped and has not ended."""
_SHOWN = 3
"""Ranks in the line that says who waits."""

_KEY = "wavemare/watchdog"
_meetings = itertools.count()
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


def acquire(config: WatchdogConfig) -> Watchdog:
    """Return this process's watchdog, started if none runs; the last `Watchdog.release` stops it.

    All engines of a process share it, with the settings of the first.

    Raises:
        OSError: There is no free port.
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


def _close_in_child() -> None:
    # A loader's worker with the socket would make a killed rank seem stopped.
    for watchdog in _running:
        watchdog._server.socket.close()
    _running.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Watchdog:
    """Watches this process, and asks the watchdogs of the others before it ends the run.

    Only marked waits (`wavemare.comm.waits`) count: a process that computes, loads or writes is
    never ended. Each waiting rank probes whether the next one was killed. After ``timeout_s`` of
    waiting a rank asks all others. If all have waited as long, or have gone, every rank writes a
    report, one prints why (`diagnose`), and all end with `EXIT_CODE`; else one line says who waits
    for whom. Watchdogs use sockets of their own, so they answer while training waits.

    Args:
        config: The section ``watchdog``.
        progress: Of this process.
        leave: Ends the process; for tests.
        force: Ends it in any case; for tests.
        machine: Of `this_machine`; for tests.
        last_s: Seconds after which ``force`` is called.
        clock: Returns seconds.
        longest_tick_s: The most seconds between two looks.
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
        self._server = Server(lambda: self._token, self._answer)
        self._server.timeout = self._tick_s
        port = int(self._server.server_address[1])
        machine = this_machine() if machine is None else machine
        rank, host = environment_rank(), socket.gethostname()
        self._me = PeerAddress(rank, host, os.getpid(), LOOPBACK, port, machine)
        self._ranks = [self._me]
        self._token = ""
        self._met = environment_world_size() == 1
        self._notices: dict[int, str] = {}
        self._wait: Wait | None = None
        self._waited_s = self._printed_s = 0.0
        self._reached: set[PeerAddress] = set()
        self._silent: dict[PeerAddress, tuple[float, float]] = {}
        self._next_probe = self._next_inquiry = 0.0
        self._limits: dict[str, timedelta] = {}
        self._holders = 1
        self._seen = clock()
        self._stopped = False
        self._lock = threading.Lock()
        self._look_thread = self._end_thread = self._new_look()
        self._thread = threading.Thread(target=self._run, name="wavemare-watchdog", daemon=True)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> Watchdog:
        """Begin to watch this process alone, in place of another watchdog."""
        for other in list(_running):
            other.stop()
        _running.append(self)
        self._seen = self._clock()
        mark_waits()
        self._thread.start()
        atexit.register(self._at_exit)
        return self

    def meet(self, group: tuple[Any, int, int] | None = None) -> None:
        """Learn the addresses of the other ranks' watchdogs; every `initialize` calls it.

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
        address = reachable_address() if size > 1 else LOOPBACK
        self._me = replace(self._me, rank=rank, address=address)
        meeting = next(_meetings)
        keys = [f"{_KEY}/{meeting}/{n}" for n in range(size)]
        own = {"token": self._token or secrets.token_hex(16), "peer": asdict(self._me)}
        store.set(keys[rank], json.dumps(own))
        meet(store, f"{_KEY}/{meeting}", size)
        found = [json.loads(text) for text in store.multi_get(keys)]
        self._ranks = [PeerAddress(**each["peer"]) for each in found]
        self._token = found[0]["token"]
        self._notices.clear()
        self._met = True
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
        if self._holders > 0 or self.ending:
            return
        if notify:
            self.send_exit_notice()
        self.stop()

    def stop(self) -> None:
        """Stop watching, whoever holds it."""
        if self in _running:
            _running.remove(self)
            _limit_collectives(self._limits, None)
        atexit.unregister(self._at_exit)
        self._last.cancel()
        self._stopped = True
        if self._thread.is_alive():
            self._server.wake()
            for thread in (self._thread, self._look_thread):
                # A thread of its own may collect an engine, and so come here.
                if thread.is_alive() and thread is not threading.current_thread():
                    thread.join(_GRACE_S)

    def send_exit_notice(self, code: int = 0) -> None:
        """Tell the nearest rank before this one that this one ends, and which others have.

        Args:
            code: Exit code of this process.
        """
        if self not in _running or len(self._ranks) == 1:
            return
        said = f"after step {self.progress.step}{f' with exit code {code}' if code else ''}"
        notices = {**self._notices, self._me.rank: said}
        deadline = time.monotonic() + _GRACE_S
        for distance in range(1, len(self._ranks)):
            peer = self._ranks[self._me.rank - distance]
            if peer.rank in self._notices:
                continue
            answer = ask(peer, self._token, {"ask": "remember", "notices": notices})
            if isinstance(answer, dict) or time.monotonic() > deadline:
                return

    def _at_exit(self) -> None:
        if self.ending:
            self._end_thread.join(_LAST_S)  # it ends the process; a shutdown might hang
        self.send_exit_notice()
        # The interpreter takes seconds to end, in which nobody would answer.
        self.stop()

    # --- watching -------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._server:
            while not self._stopped:
                self._server.handle_request()  # or a tick passes
                self._count()
                if self._is_look_due() and not self._look_thread.is_alive():
                    self._look_thread = self._new_look()
                    self._look_thread.start()

    def _count(self) -> None:
        """Count the seconds of a wait, but not those in which this process was suspended."""
        now, wait = self._clock(), self.progress.wait
        if wait is not self._wait:
            self._wait, self._waited_s, self._printed_s = wait, 0.0, 0.0
        elif wait is not None:
            self._waited_s += min(now - self._seen, self._tick_s + _PAUSE_S)
        self._seen = now

    def _status(self) -> RankStatus:
        waited_s = self._waited_s if self.progress.wait is self._wait else 0.0
        status = RankStatus.of(self._me.rank, self.progress, waited_s)
        return replace(status, notices={str(k): text for k, text in self._notices.copy().items()})

    def _is_look_due(self) -> bool:
        due = min(_NEXT_S, self.config.timeout_s / 2)
        following = self._next
        # Ranks of other hosts are known to have ended only if they have answered before.
        unknown = following is not None and following not in self._reached
        asks = unknown and self._clock() >= self._next_probe
        return not self.ending and (asks or self._waited_s >= due)

    def _new_look(self) -> threading.Thread:
        return threading.Thread(target=self._look, name="wavemare-watchdog-look", daemon=True)

    def _look(self) -> None:
        try:
            self._probe_next()
            if not self.ending and self._waited_s >= self.config.timeout_s:
                self._inquire_all()
        except Exception:
            logger.exception("the watchdog could not look")  # and goes on

    def _probe_next(self) -> None:
        """Look whether the next rank was killed.

        gloo does not notice the end of a rank that has sent a part of a message, and waits on.
        """
        following, now = self._next, self._clock()
        if following is None or now < self._next_probe:
            return
        self._next_probe = now + min(_NEXT_S, self.config.timeout_s / 4)
        (answer,) = self._ask([following])
        ended = isinstance(answer, UnreachablePeer) and self._has_ended(following, answer.gone)
        if not ended or self._waited_s < _NEXT_S:
            return
        statuses, unreachable = self._inquire()
        lost = [each for each in unreachable if each.peer == following and each.notice is None]
        if not lost or self._waited_s < _NEXT_S:
            return
        statuses.append(own := self._status())
        headline = f"rank {own.rank} has waited for {own.waited_s:.0f} s, and {following} has ended"
        self._end(diagnose_unreachable(lost), statuses, unreachable, headline)

    def _inquire_all(self) -> None:
        """Ask all ranks whether any goes on, unless a rank before this one does so."""
        limit = self.config.timeout_s
        if not self._met:
            return self._print_wait([])
        time.sleep(min(self._me.rank * _TURN_S, _LONGEST_TURN_S))
        following = self._next
        if self._clock() < self._next_inquiry and not (following and self._is_lost(following)):
            return None
        statuses, unreachable = self._inquire(by=self._me.rank)
        self._next_inquiry = self._clock() + min(_NEXT_S, limit / 4)
        statuses.append(own := self._status())
        lost = [each.peer for each in unreachable if self._is_lost(each.peer)]
        diagnosis = diagnose(statuses, unreachable, lost, limit)
        if diagnosis is None:
            computing = [f"{self._ranks[each.rank]} {each}" for each in statuses if not each.wait]
            return self._print_wait([*computing, *(f"{each.peer} {each}" for each in unreachable)])
        headline = (
            f"rank {own.rank} has waited for {own.waited_s:.0f} s (wavemare.watchdog.timeout_s is "
            f"{limit:g}), and no rank makes progress"
        )
        return self._end(diagnosis, statuses, unreachable, headline)

    def _print_wait(self, others: Sequence[str]) -> None:
        """Print who waits and who computes: at ``timeout_s``, then at each doubling."""
        if self._waited_s >= 2 * self._printed_s:
            self._printed_s = self._waited_s
            line = "; ".join([f"{self._me} {self._status()}", *others[:_SHOWN]])
            print(f"watchdog: {line}; the run goes on", file=sys.__stderr__, flush=True)

    @property
    def _next(self) -> PeerAddress | None:
        """The first rank after this one that has not said that it ends; None if there is none."""
        ranks, own = self._ranks, self._me.rank  # `meet` replaces the list
        after = (ranks[(own + n) % len(ranks)] for n in range(1, len(ranks)))
        return next((peer for peer in after if peer.rank not in self._notices), None)

    def _ask(self, peers: Sequence[PeerAddress], by: int | None = None) -> list[Any]:
        """Ask some ranks for their status, and note who answers."""
        now = self._clock()
        answers = ask_all(peers, self._token, {"ask": "status", "by": by})
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, UnreachablePeer):
                since, last = self._silent.get(peer, (now, now))
                self._silent[peer] = since if now - last < _FORGET_S else now, now
            else:
                self._reached.add(peer)
                self._silent.pop(peer, None)
                self._notices.update({int(k): text for k, text in answer["notices"].items()})
        return answers

    def _inquire(self, by: int | None = None) -> tuple[list[RankStatus], list[UnreachablePeer]]:
        """Return what the other ranks do; those after rank ``by`` need not ask themselves."""
        answers = self._ask([peer for peer in self._ranks if peer != self._me], by)
        statuses = [RankStatus(**each) for each in answers if isinstance(each, dict)]
        unreachable = [
            replace(each, notice=self._notices.get(each.peer.rank))
            for each in answers
            if isinstance(each, UnreachablePeer)
        ]
        return statuses, unreachable

    def _is_lost(self, peer: PeerAddress) -> bool:
        """Whether a rank has been silent for long, and does not compute for all that is known.

        The address of a rank of another machine may be wrong, so that one must have answered once.
        """
        if peer not in self._silent:
            return False
        if peer.machine == self._me.machine:
            if process_state(peer.pid) in _RUNS:
                return False  # it computes without giving way to its watchdog
        elif peer not in self._reached:
            return False
        return self._clock() - self._silent[peer][0] >= self.config.timeout_s / 2

    def _has_ended(self, peer: PeerAddress, gone: bool) -> bool:
        """Whether the process of a rank that does not answer has certainly ended.

        Its address may be wrong, or blocked for a moment. So a rank of another machine must have
        answered before, and its host must refuse connections twice.

        Args:
            peer: The rank.
            gone: Whether its host refuses the connection now.
        """
        if peer.machine == self._me.machine:
            return process_has_ended(peer.pid)
        silent_s = self._clock() - self._silent[peer][0]
        return gone and peer in self._reached and silent_s >= _BLOCKED_S

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["ask"]:
            case "end":
                threading.Thread(target=self._follow, args=(request,), daemon=True).start()
            case "remember":
                self._notices.update({int(k): text for k, text in request["notices"].items()})
            case "status":
                if request["by"] is not None and request["by"] < self._me.rank:
                    self._next_inquiry = self._clock() + 2 * _NEXT_S
        return asdict(self._status())

    # --- the end --------------------------------------------------------------------------------

    def _begin_end(self) -> bool:
        """Decide that this process ends, whatever fails from here on; False if it ends already."""
        with self._lock:
            if self.ending or self._stopped:
                return False
            self._last.start()
            self.ending, self._end_thread = True, threading.current_thread()
        return True

    def _end(
        self,
        diagnosis: Diagnosis,
        statuses: Sequence[RankStatus],
        unreachable: Sequence[UnreachablePeer],
        headline: str,
    ) -> None:
        """End all ranks that answer, and this one."""
        if not self._begin_end():
            return
        summary = diagnosis.summary(self._ranks, statuses, unreachable, headline, self._folder)
        ranks = [each.rank for each in statuses]
        speaker = min([rank for rank in ranks if rank not in diagnosis.suspects] or ranks)
        request = {"ask": "end", "summary": summary, "speaker": speaker}
        others = [self._ranks[rank] for rank in ranks if rank != self._me.rank]
        answers = ask_all(others, self._token, request)
        deaf = [each.peer.rank for each in answers if isinstance(each, UnreachablePeer)]
        self._report(summary, speaks=speaker in (self._me.rank, *deaf))
        time.sleep(_GRACE_S)
        for each in unreachable:  # launchers would wait for stopped ranks of this machine
            here = each.peer.machine == self._me.machine and not each.gone
            if here and process_state(each.peer.pid) in ("T", "t"):
                os.kill(each.peer.pid, signal.SIGKILL)
        self._leave(EXIT_CODE)

    def _follow(self, request: dict[str, Any]) -> None:
        """End because another rank's watchdog says so."""
        if self._begin_end():
            self._report(str(request["summary"]), speaks=request["speaker"] == self._me.rank)
            time.sleep(_GRACE_S)
            self._leave(EXIT_CODE)

    @property
    def _folder(self) -> str:
        return str(Path(self.config.folder).resolve())

    def _report(self, summary: str, *, speaks: bool) -> None:
        problem = self._write_report(summary.splitlines()[0])
        lines = [*([summary] if speaks else []), *([problem] if problem else [])]
        if lines:
            print("\n".join(lines), file=sys.__stderr__, flush=True)

    def _write_report(self, headline: str) -> str | None:
        return write_report(self._folder, self._me, self._status(), self.progress, headline)

    def explain_loss(self) -> str | None:
        """Say which ranks have gone, if any have, and write this rank's report.

        For a rank whose collective has failed because a peer has gone.
        """
        if self not in _running:
            return None
        statuses, unreachable = self._inquire()
        gone = [each for each in unreachable if each.gone]
        if not gone:
            return None
        statuses.append(self._status())
        headline = f"rank {self._me.rank} has lost rank {', '.join(str(e.peer.rank) for e in gone)}"
        if (broken := self.progress.broken) is not None:
            headline += f" in {broken}, step {self.progress.step}"
        self._write_report(headline)
        diagnosis = diagnose_unreachable(gone)
        return diagnosis.summary(self._ranks, statuses, unreachable, headline, self._folder)
