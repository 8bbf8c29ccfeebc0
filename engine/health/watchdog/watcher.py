# SPDX-License-Identifier: Apache-2.0
"""The watchdog of a process: a thread that notices when ranks only wait, and ends the run."""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from wavemare.comm.waits import Wait
from wavemare.engine.config.sections import WatchdogConfig
from wavemare.engine.health.watchdog.diagnosis import Diagnosis, blame, diagnose
from wavemare.engine.health.watchdog.exit_notice import Farewells
from wavemare.engine.health.watchdog.marks import limit_collectives, mark_torch
from wavemare.engine.health.watchdog.peers import (
    LOOPBACK,
    ask_all,
    listening_socket,
    reachable_address,
    serve,
)
from wavemare.engine.health.watchdog.report import write_report
from wavemare.engine.health.watchdog.status import PeerAddress, RankStatus, UnreachablePeer
from wavemare.engine.launch.exit import leave_at_once
from wavemare.engine.launch.group import environment_rank, environment_world_size
from wavemare.engine.observe.progress import PROGRESS, Progress
from wavemare.processes import process_has_ended, process_state, this_machine

__all__ = ["EXIT_CODE", "Watchdog", "current", "hold"]

logger = logging.getLogger("wavemare")

EXIT_CODE = 124
"""Of a run that the watchdog ends, as that of ``timeout``."""

_TICKS = 20
_PAUSE_S = 1.0
"""What a tick may be late: this process has been suspended for the rest."""
_NEXT_S = 5.0
"""For so long a rank waits before it asks the next one, and then between its questions."""
_TURN_S, _LONGEST_TURN_S = 0.05, 2.0
"""Rank 0 asks all others first, for the others: N ranks that ask all would be N * N questions."""
# For the others' reports and the one summary, before a launcher ends the rest.
_GRACE_S = 1.0
# For telling the others; those not reached by then look for themselves.
_TELL_S = 4.0
# After which the process ends though something on the way fails or is held up: a file system that
# has gone, a pipe that nobody reads.
_LAST_S = 10.0
_JOIN_S = 5.0
# For so long a rank elsewhere has not answered that refuses, and so has ended; a rank that was not
# asked for the other time has not been silent.
_BLOCKED_S, _FORGET_S = 1.0, 15.0

_RUNS = ("R", "S", "D")
"""States of a process that is not stopped and has not ended."""
_SHOWN = 3
"""Ranks of which the line tells that says who waits."""

_KEY = "wavemare/watchdog"

_Found = TypeVar("_Found")

_meetings = itertools.count()
"""This process's; all ranks come to the same ones."""

_running: list[Watchdog] = []


def current() -> Watchdog | None:
    """Return the watchdog of this process, if one is running."""
    return _running[-1] if _running else None


def hold(config: WatchdogConfig) -> Watchdog:
    """Return this process's watchdog, started if none runs; the last `Watchdog.release` stops it.

    All engines of a process share it, with the settings of the first; a rank says in a warning
    which of a later one's do not count.

    Args:
        config: The section ``watchdog``.

    Raises:
        OSError: There is no free port.
    """
    running = current()
    if running is None or not running._thread.is_alive():
        return Watchdog(config).start()
    running._holders += 1
    kept, asked = running.config.model_dump(), config.model_dump()
    changed = [key for key in asked if asked[key] != kept[key]]
    if changed and running._me.rank == 0:
        logger.warning(
            "wavemare.watchdog: %s of this engine does not count: the process's watchdog, which an "
            "earlier engine has started, goes on with %s",
            ", ".join(f"{key} = {asked[key]}" for key in changed),
            ", ".join(f"{key} = {kept[key]}" for key in changed),
        )
    return running


def _forget_in_child() -> None:
    # A loader's worker that held the socket would make a rank that was killed seem to stand still.
    for watchdog in _running:
        watchdog._listener.close()
    _running.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class Watchdog:
    """Watches this process, and asks the watchdogs of the others before it ends the run.

    Only waits that are marked (`wavemare.comm.waits`) count: a process that computes, loads or
    writes is never ended. Every rank that waits looks whether the next one was killed. One that
    has waited for ``timeout_s`` asks all others: if all wait as long, or have gone, every rank
    writes a report, one prints why (`diagnose`), and all end with `EXIT_CODE`; else one line says
    who waits for whom. The watchdogs' sockets are their own: they answer while the training thread
    waits in a collective, also if rank 0 and its store have gone.

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
        leave: Callable[[int], Any] = leave_at_once,
        force: Callable[[int], Any] = os._exit,
        machine: str | None = None,
        last_s: float = _LAST_S,
        clock: Callable[[], float] = time.monotonic,
        longest_tick_s: float = 1.0,
    ) -> None:
        self.config = config
        self.progress = progress
        self._leave = leave
        self._last = threading.Timer(last_s, force, (EXIT_CODE,))
        self._last.daemon = True
        self._listener = listening_socket()
        rank = environment_rank()
        host, port = socket.gethostname(), int(self._listener.getsockname()[1])
        machine = this_machine() if machine is None else machine
        self._me = PeerAddress(rank, host, os.getpid(), LOOPBACK, port, machine)
        self._ranks: list[PeerAddress] = [self._me]
        self._token = ""
        self._farewells: Farewells | None = None
        self._clock = clock
        self._tick_s = min(config.timeout_s / _TICKS, longest_tick_s)
        self._wait: Wait | None = None
        self._waited_s = 0.0
        self._told_s = 0.0
        self._reached: set[PeerAddress] = set()
        self._silent: dict[PeerAddress, tuple[float, float, UnreachablePeer]] = {}
        self._next_ask = self._next_inquiry = 0.0
        self._met = False
        self._limits: dict[str, timedelta] = {}
        self._ended = False
        self._holders = 0
        self._seen = clock()
        # What is under way when it ends is cancelled, such as a question of another rank.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="wavemare-watchdog", daemon=True)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> Watchdog:
        """Begin to watch this process alone, in place of one that still does (`hold` shares it)."""
        for other in list(_running):
            other.stop()
        _running.append(self)
        self._holders = 1
        self._seen = self._clock()
        mark_torch()
        self._thread.start()
        atexit.register(self._at_exit)
        return self

    def meet(self, group: tuple[Any, int, int] | None = None) -> None:
        """Get to know the other ranks' watchdogs; all ranks of the group call it.

        Also for a watchdog that is shared: whether it is can differ between ranks, as an engine
        that is not destroyed is collected at any time.

        Args:
            group: Store, rank and number of ranks; None for those of the default process group.
        """
        from torch import distributed
        from torch.distributed import distributed_c10d

        # Not a collective, for which NCCL would need a device that is not chosen yet.
        store, rank, world_size = group or (
            distributed_c10d._get_default_store(),
            distributed.get_rank(),
            distributed.get_world_size(),
        )
        meeting = next(_meetings)
        self._me = replace(self._me, rank=rank)
        if world_size > 1:
            # Only now: where MPI starts the ranks, the variables have been set on the way here.
            self._me = replace(self._me, address=reachable_address())
        places = [f"{_KEY}/{meeting}/{n}" for n in range(world_size)]
        told = {"token": secrets.token_hex(16), "known": self._token, "where": asdict(self._me)}
        store.set(places[rank], json.dumps(told))
        found = [json.loads(text) for text in store.multi_get(places)]  # waits for all
        known = {each["known"] for each in found}
        self._ranks = [PeerAddress(**each["where"]) for each in found]
        # One that all know goes on: a rank that is still here would not be answered with another.
        self._token = known.pop() if len(known) == 1 and "" not in known else found[0]["token"]
        self._farewells = Farewells(store, self._token)
        self._met = True
        self.let_collectives_wait()

    def let_collectives_wait(self) -> None:
        """Let no collective fail because a peer computes for long: this watchdog sees to it."""
        limit_collectives(self._limits, self.config.collective_timeout_s)

    def release(self, *, farewell: bool = True) -> None:
        """Give back what `hold` has returned; the last one stops it, unless it is ending the run.

        Args:
            farewell: Whether this rank then ends in good order, as `bid_farewell` tells the others.
        """
        self._holders -= 1
        if self._holders > 0 or self._ended:
            return
        try:
            if farewell:
                self.bid_farewell()
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop watching, whoever holds it; waits for the thread."""
        if self in _running:
            _running.remove(self)
            limit_collectives(self._limits, None)
        atexit.unregister(self._at_exit)
        self._last.cancel()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            if self._thread is not threading.current_thread():  # which may collect an engine
                self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._watch())

    async def _watch(self) -> None:
        server = await serve(self._listener, lambda: self._token, self._answer)
        look = asyncio.create_task(self._look())
        try:
            while not self._stop.is_set():
                self._count()
                if look.done():
                    look = asyncio.create_task(self._look())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._tick_s)
        finally:
            look.cancel()
            server.close()
            await server.wait_closed()

    # --- watching -------------------------------------------------------------------------------

    def _count(self) -> None:
        """Count the seconds of a wait, but not those in which this process was suspended."""
        now, wait = self._clock(), self.progress.wait
        if wait is not self._wait:
            self._wait, self._waited_s, self._told_s = wait, 0.0, 0.0
        elif wait is not None:
            self._waited_s += min(now - self._seen, self._tick_s + _PAUSE_S)
        self._seen = now

    def _status(self) -> RankStatus:
        waited_s = self._waited_s if self.progress.wait is self._wait else 0.0
        return RankStatus.of(self._me.rank, self.progress, waited_s)

    async def _look(self) -> None:
        try:
            if not self._ended:
                await self._look_at_next()
            if not self._ended and self._waited_s >= self.config.timeout_s:
                await self._look_at_all()
        except Exception:
            logger.exception("the watchdog could not look")  # and goes on

    async def _look_at_next(self) -> None:
        """Look whether the next rank has been killed, if this one has waited for seconds.

        gloo does not notice the end of a rank that has sent a part of a message, and waits on.
        Each rank looks for one other, so that in a long step nobody is asked by all.
        """
        following, limit, now = self._next, self.config.timeout_s, self._clock()
        if following is None or now < self._next_ask:
            return
        # Once in any case: of ranks elsewhere, only those reached before are known to have ended.
        if following in self._reached and self._waited_s < min(_NEXT_S, limit / 2):
            return
        self._next_ask = now + min(_NEXT_S, limit / 4)
        if not await self._find_ended([following]) or self._waited_s < _NEXT_S:
            return
        statuses, unreachable = await self._inquire()
        lost = [each for each in unreachable if each.of == following and each.is_unexplained]
        if not lost or self._waited_s < _NEXT_S or self._ended:
            return  # that one has said why, or this one goes on or ends by itself
        statuses.append(own := self._status())
        headline = f"rank {own.rank} has waited for {own.waited_s:.0f} s, and {following} has ended"
        await self._end(blame(lost), statuses, unreachable, headline)

    async def _look_at_all(self) -> None:
        """Look whether any rank goes on, unless one before this rank does so."""
        limit, following = self.config.timeout_s, self._next
        if not self._met and environment_world_size() > 1:
            return self._tell([])  # it knows no others yet
        await asyncio.sleep(min(self._me.rank * _TURN_S, _LONGEST_TURN_S))
        if self._clock() < self._next_inquiry and not self._is_lost(following):
            return None
        statuses, unreachable = await self._inquire(by=self._me.rank)
        self._next_inquiry = self._clock() + min(_NEXT_S, limit / 4)
        statuses.append(own := self._status())
        lost = [each.of for each in unreachable if self._is_lost(each.of)]
        diagnosis = diagnose(statuses, unreachable, lost, limit)
        if diagnosis is None or self._ended:
            computing = [f"{self._ranks[each.rank]} {each}" for each in statuses if not each.wait]
            return self._tell([*computing, *(f"{each.of} {each}" for each in unreachable)])
        headline = (
            f"rank {own.rank} has waited for {own.waited_s:.0f} s (wavemare.watchdog.timeout_s is "
            f"{limit:g}), and no rank goes on"
        )
        return await self._end(diagnosis, statuses, unreachable, headline)

    def _tell(self, others: Sequence[str]) -> None:
        """Say that this rank waits and what others do: at ``timeout_s``, and each time doubled."""
        if self._waited_s >= 2 * self._told_s:
            self._told_s = self._waited_s
            told = "; ".join([f"{self._me} {self._status()}", *others[:_SHOWN]])
            print(f"watchdog: {told}; the run goes on", file=sys.__stderr__, flush=True)

    @property
    def _next(self) -> PeerAddress | None:
        """The rank after this one, which it looks after; None if there is none."""
        following = self._ranks[(self._me.rank + 1) % len(self._ranks)]  # `meet` replaces the list
        return following if following != self._me else None

    def _is_lost(self, of: PeerAddress | None) -> bool:
        """Whether a rank that once answered has not done so for long."""
        if of is None or of not in self._reached or of not in self._silent:
            return False
        if of.machine == self._me.machine and process_state(of.pid) in _RUNS:
            return False  # it computes, and does not give way to its watchdog
        return self._clock() - self._silent[of][0] >= self.config.timeout_s / 2

    async def _find_ended(self, where: Sequence[PeerAddress]) -> set[int]:
        """Return those of some ranks whose processes have certainly ended."""
        await self._ask(where, {"ask": "status"})
        return {of.rank for of in where if of in self._silent and self._is_certain(of)}

    async def _ask(self, where: Sequence[PeerAddress], request: dict[str, Any]) -> list[Any]:
        """Ask some ranks, and note who answers."""
        now = self._clock()
        answers = await ask_all(where, self._token, request)
        for of, answer in zip(where, answers, strict=True):
            if isinstance(answer, UnreachablePeer):
                since, last, _ = self._silent.get(of, (now, now, answer))
                self._silent[of] = since if now - last < _FORGET_S else now, now, answer
            else:
                self._reached.add(of)
                self._silent.pop(of, None)
        return answers

    def _is_certain(self, of: PeerAddress) -> bool:
        """Whether a rank at whose socket nobody listens has ended.

        On this machine it has no process. Elsewhere it has answered before, and refuses after a
        second of silence: an address may be wrong, or blocked for a moment.
        """
        if of.machine == self._me.machine:
            return process_has_ended(of.pid)
        since, _, answer = self._silent[of]
        return answer.gone and of in self._reached and self._clock() - since >= _BLOCKED_S

    async def _inquire(
        self, by: int | None = None
    ) -> tuple[list[RankStatus], list[UnreachablePeer]]:
        """Return what the other ranks do.

        Args:
            by: The rank that asks for all those after it, which then need not ask.
        """
        others = [where for where in self._ranks if where.rank != self._me.rank]
        lost = [where for where in others if self._is_lost(where)]
        asked = [where for where in others if where not in lost]
        answers = await self._ask(asked, {"ask": "status", "by": by})
        unreachable = [each for each in answers if isinstance(each, UnreachablePeer)]
        unreachable += [self._silent[where][2] for where in lost]
        statuses = [RankStatus(**each) for each in answers if isinstance(each, dict)]
        gone = [each.of.rank for each in unreachable if each.gone]
        if gone and self._farewells is not None:
            words = self._farewells.of(gone)
            unreachable = [replace(each, farewell=words.get(each.of.rank)) for each in unreachable]
        return statuses, unreachable

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("ask") == "end" and not self._ended:
            self._begin_end()
            self._loop.create_task(self._follow(request))
        if request.get("ask") == "remember" and self._farewells is not None:
            self._farewells.hear(int(request["rank"]), str(request["text"]))
        if (by := request.get("by")) is not None and by < self._me.rank:
            self._next_inquiry = self._clock() + 2 * _NEXT_S
        return asdict(self._status())

    # --- the end --------------------------------------------------------------------------------

    def _begin_end(self) -> None:
        """Go no further back: from here on the process ends, whatever fails on the way."""
        self._last.start()
        self._ended = True

    async def _end(
        self,
        diagnosis: Diagnosis,
        statuses: Sequence[RankStatus],
        unreachable: Sequence[UnreachablePeer],
        headline: str,
    ) -> None:
        """End all ranks that answer, and this one."""
        folder = str(Path(self.config.folder).resolve())
        summary = diagnosis.summary(self._ranks, statuses, unreachable, headline, folder)
        self._begin_end()
        blameless = [each.rank for each in statuses if each.rank not in diagnosis.suspects]
        speaker = min(blameless or [each.rank for each in statuses])
        request = {"ask": "end", "summary": summary, "speaker": speaker}
        others = [self._ranks[each.rank] for each in statuses if each.rank != self._me.rank]
        try:
            answers = await asyncio.wait_for(ask_all(others, self._token, request), _TELL_S)
            deaf = {answer.of.rank for answer in answers if isinstance(answer, UnreachablePeer)}
        except Exception as error:  # what is known is still to be told, by this rank
            logger.warning("the watchdog could not tell the other ranks: %r", error)
            deaf = {speaker}
        self._report(summary, speaks=speaker == self._me.rank or speaker in deaf)
        await asyncio.sleep(_GRACE_S)
        self._release(unreachable)
        self._leave(EXIT_CODE)

    async def _follow(self, request: dict[str, Any]) -> None:
        """End because another rank's watchdog says so."""
        self._report(str(request["summary"]), speaks=request["speaker"] == self._me.rank)
        await asyncio.sleep(_GRACE_S)
        self._leave(EXIT_CODE)

    def _report(self, summary: str, *, speaks: bool) -> None:
        headline = summary.splitlines()[0]
        folder = str(Path(self.config.folder).resolve())
        problem = write_report(folder, self._me, self._status(), self.progress, headline)
        lines = [*([summary] if speaks else []), *([problem] if problem else [])]
        if lines:
            print("\n".join(lines), file=sys.__stderr__, flush=True)

    def _release(self, unreachable: Sequence[UnreachablePeer]) -> None:
        """Kill stopped ranks of this machine: launchers wait for them in vain."""
        for each in unreachable:
            here = each.of.machine == self._me.machine and not each.gone
            if here and process_state(each.of.pid) in ("T", "t"):
                os.kill(each.of.pid, signal.SIGKILL)

    # --- ends of single ranks -------------------------------------------------------------------

    def bid_farewell(self, code: int = 0) -> None:
        """Leave a word for those who would wonder where this rank is.

        Args:
            code: With which it ends.
        """
        if self._farewells is None or len(self._ranks) == 1 or self not in _running:
            return
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        text = f"after step {self.progress.step}{f' with exit code {code}' if code else ''}"
        if self._me.rank > 0:
            self._farewells.say(self._me.rank, text)
            return
        # The store may live in this process and end with it. The last rank looks for this one.
        request = {"ask": "remember", "rank": 0, "text": text}
        self._wait_for(ask_all(self._ranks[:0:-1], self._token, request), _GRACE_S)

    def _at_exit(self) -> None:
        if self._ended:
            self._thread.join(_LAST_S)  # in which it ends the process: a shutdown might hang
        self.bid_farewell()
        # The interpreter takes seconds to end, in which nobody could answer at the socket.
        self.stop()

    @property
    def ending(self) -> bool:
        """Whether it is ending this process; whatever fails meanwhile is of no interest."""
        return self._ended

    def ended(self, ranks: Collection[int]) -> set[int]:
        """Return those of some ranks whose processes have certainly ended; from any thread."""
        others = [each for each in self._ranks if each.rank in ranks and each != self._me]
        return self._wait_for(self._find_ended(others)) or set()

    def explain_loss(self) -> str | None:
        """Say which ranks have gone, if any have, and write this rank's report.

        For a rank whose collective has failed because a peer has gone.
        """
        if len(self._ranks) == 1:
            return None
        found = self._wait_for(self._inquire())
        if found is None:
            return None
        statuses, unreachable = found
        gone = [each for each in unreachable if each.gone]
        if not gone:
            return None
        ranks = tuple(each.of.rank for each in gone)
        headline = f"rank {self._me.rank} has lost rank {', '.join(map(str, ranks))}"
        if (broken := self.progress.broken) is not None:
            headline += f" in {broken}, step {self.progress.step}"
        folder = str(Path(self.config.folder).resolve())
        write_report(folder, self._me, self._status(), self.progress, headline)
        return blame(gone).summary(self._ranks, statuses, unreachable, headline, folder)

    def _wait_for(
        self, inquiry: Coroutine[Any, Any, _Found], seconds: float = _JOIN_S
    ) -> _Found | None:
        """Return what its thread finds out for another one; None if it stops, or takes too long."""
        if not self._thread.is_alive():
            inquiry.close()
            return None
        try:
            found = asyncio.run_coroutine_threadsafe(inquiry, self._loop)
        except RuntimeError:  # its loop has just been closed
            inquiry.close()
            return None
        try:
            return found.result(seconds)
        except (CancelledError, TimeoutError, RuntimeError):
            if not self._loop.is_closed():
                found.cancel()
            return None
