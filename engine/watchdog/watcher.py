# SPDX-License-Identifier: Apache-2.0
"""The watchdog of a process: a thread that notices when nothing moves, and ends the run."""

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
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from wavemare.engine.launch import environment_rank
from wavemare.engine.leaving import leave_at_once
from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.farewell import Farewells
from wavemare.engine.watchdog.peers import (
    LOOPBACK,
    ask_all,
    listening_socket,
    reachable_address,
    serve,
)
from wavemare.engine.watchdog.progress import PROGRESS, Progress
from wavemare.engine.watchdog.report import write_report
from wavemare.engine.watchdog.standing import Absent, Standing, Whereabouts
from wavemare.engine.watchdog.verdict import Verdict, blame, judge
from wavemare.processes import process_has_ended, process_state, this_machine

__all__ = ["EXIT_CODE", "Watchdog", "current", "hold"]

logger = logging.getLogger("wavemare")

EXIT_CODE = 124
"""Of a run that the watchdog ends, as that of ``timeout``."""

_TICKS = 20
_LONGEST_TICK_S = 1.0
# Rank 0 asks first, and if it gets to a verdict, tells the others: N ranks that all ask all would
# be N * N connections.
_TURN_S, _LONGEST_TURN_S = 0.05, 2.0
# For the others' reports and the one summary, before a launcher ends the rest.
_GRACE_S = 1.0
# For telling the others; those not reached by then look for themselves.
_TELL_S = 4.0
# After which the process ends though something on the way fails or is held up: a file system that
# has gone, a pipe that nobody reads.
_LAST_S = 10.0
_JOIN_S = 5.0
_NEXT_S = 5.0
"""For so long a rank waits before it asks for the next one, and asks again."""
# A rank elsewhere that refuses is asked again after the one and before the other.
_BLOCKED_S, _FORGET_S = 1.0, 15.0
_PAUSE_S = 1.0
"""A tick that comes so much too late: this process has been suspended."""

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

    A process that has been in one place (`Progress`) for longer than it may is either stuck or
    waits for one that is. So its watchdog asks all others where they stand: if one of them moves,
    the run is slow, not stuck. Otherwise every rank writes a report, one prints whom to blame
    (`judge`), and all end with `EXIT_CODE`. The watchdogs' sockets are their own: they answer while
    the training thread waits in a collective, also if rank 0 and its store have gone.

    Args:
        config: The section ``watchdog``.
        progress: Of this process.
        leave: Ends the process; for tests.
        force: Ends it in any case; for tests.
        machine: Of `this_machine`; for tests.
        last_s: Seconds after which ``force`` is called.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        progress: Progress = PROGRESS,
        leave: Callable[[int], Any] = leave_at_once,
        force: Callable[[int], Any] = os._exit,
        machine: str | None = None,
        last_s: float = _LAST_S,
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
        self._me = Whereabouts(rank, host, os.getpid(), LOOPBACK, port, machine)
        self._ranks: list[Whereabouts] = [self._me]
        self._token = ""
        self._farewells: Farewells | None = None
        self._moves_until: dict[int, float] = {}
        self._reached: set[Whereabouts] = set()
        self._refused: dict[Whereabouts, float] = {}
        self._next_ask = 0.0
        self._ended = False
        self._holders = 0
        self._seen = self.progress.clock()
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
        self._seen = self.progress.clock()
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
        self._ranks = [Whereabouts(**each["where"]) for each in found]
        # One that all know goes on: a rank that is still here would not be answered with another.
        self._token = known.pop() if len(known) == 1 and "" not in known else found[0]["token"]
        self._farewells = Farewells(store, self._token)

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
        tick = min(self.config.timeout_s / _TICKS, _LONGEST_TICK_S)
        try:
            while not self._stop.is_set():
                late = self.progress.clock() - self._seen - tick
                if late > _PAUSE_S:
                    # With all its ranks, perhaps: schedulers do so, and a machine's host.
                    self.progress.pardon(late)
                try:
                    await self._look()
                except Exception:
                    logger.exception("the watchdog could not look")  # and goes on
                self._seen = self.progress.clock()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), tick)
        finally:
            server.close()
            await server.wait_closed()

    # --- watching -------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        return Standing.of(self._me.rank, self.progress, self.config)

    @property
    def _is_stuck(self) -> bool:
        config = self.config
        patience = self.progress.patience(config.timeout_s, config.start_timeout_s)
        return not self.progress.place.outside and self.progress.age_s >= patience

    async def _look(self) -> None:
        if self._ended:
            return
        if not self._is_stuck:
            await self._look_for_next()
            return
        await asyncio.sleep(min(self._me.rank * _TURN_S, _LONGEST_TURN_S))
        if not self._is_stuck or self._ended:
            return
        standings, absent = await self._inquire()
        own = self._standing()
        standings.append(own)
        if self._moved_lately(standings, absent):
            return
        verdict = judge(standings, absent)
        if verdict is None or self._ended:
            return
        headline = (
            f"rank {own.rank} has not moved for {own.age_s:.0f} s "
            f"(wavemare.watchdog allows {own.patience_s:g} s)"
            f"{', and no other rank has' if len(self._ranks) > 1 else ''}"
        )
        await self._end(verdict, standings, absent, headline)

    async def _look_for_next(self) -> None:
        """Look whether the next rank has been killed, if this one seems to have waited for seconds.

        gloo does not notice the end of a rank that has sent a part of a message, and waits on.
        Each rank looks for one other, so that in a long step nobody is asked by all.
        """
        ranks = self._ranks  # which `meet` replaces
        following = ranks[(self._me.rank + 1) % len(ranks)]
        if following == self._me or self.progress.clock() < self._next_ask:
            return
        # Once in any case: of ranks elsewhere, only those reached before are known to have ended.
        if following in self._reached and not self._waits_long:
            return
        self._next_ask = self.progress.clock() + _NEXT_S
        if not await self._find_ended([following]):
            return
        standings, absent = await self._inquire()
        lost = [each for each in absent if each.of == following and each.is_unexplained]
        if not lost or not self._waits_long or self._ended:
            return  # that one has said why, or this one goes on or ends by itself
        standings.append(own := self._standing())
        headline = f"rank {own.rank} has not moved for {own.age_s:.0f} s, and {following} has ended"
        await self._end(blame(lost), standings, absent, headline)

    @property
    def _waits_long(self) -> bool:
        own = self.progress
        patience = own.patience(self.config.timeout_s, self.config.start_timeout_s)
        # Not with an answer to wait for when all are to be asked.
        now = not own.place.outside and _NEXT_S < own.age_s < patience - _NEXT_S
        return now and self._standing().waits

    async def _find_ended(self, where: Sequence[Whereabouts]) -> set[int]:
        """Return those of some ranks whose processes have certainly ended."""
        answers = await ask_all(where, self._token, {"ask": "standing"})
        found = set()
        for of, answer in zip(where, answers, strict=True):
            if not isinstance(answer, Absent):
                self._reached.add(of)
                self._refused.pop(of, None)
            elif answer.gone and self._is_certain(of):
                found.add(of.rank)
        return found

    def _is_certain(self, of: Whereabouts) -> bool:
        """Whether a rank at whose socket nobody listens has ended.

        On this machine it has no process. Elsewhere it has answered before, and refuses for a
        second time: an address may be wrong, or blocked for a moment.
        """
        if of.machine == self._me.machine:
            return process_has_ended(of.pid)
        if of not in self._reached:
            return False
        now = self.progress.clock()
        first = self._refused.get(of)
        if first is None or now - first > _FORGET_S:
            self._refused[of] = now
            return False
        return now - first >= _BLOCKED_S

    async def _inquire(self) -> tuple[list[Standing], list[Absent]]:
        """Return where the other ranks stand."""
        others = [where for where in self._ranks if where.rank != self._me.rank]
        standings: list[Standing] = []
        absent: list[Absent] = []
        for answer in await ask_all(others, self._token, {"ask": "standing"}):
            if isinstance(answer, Absent):
                absent.append(answer)
            else:
                standings.append(Standing(**answer))
        gone = [each.of.rank for each in absent if each.gone]
        if gone and self._farewells is not None:
            words = self._farewells.of(gone)
            absent = [replace(each, farewell=words.get(each.of.rank)) for each in absent]
        return standings, absent

    def _moved_lately(self, standings: Sequence[Standing], absent: Sequence[Absent]) -> bool:
        """Whether a rank that does not answer has moved, when it last did, and has time left."""
        now = self.progress.clock()
        for each in standings:
            self._moves_until[each.rank] = now - each.age_s + each.patience_s
        silent = [each.of.rank for each in absent if not each.gone]
        return any(self._moves_until.get(rank, now) > now for rank in silent)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("ask") == "end" and not self._ended:
            self._begin_end()
            self._loop.create_task(self._follow(request))
        if request.get("ask") == "remember" and self._farewells is not None:
            self._farewells.hear(int(request["rank"]), str(request["text"]))
        return self._standing().to_json()

    # --- the end --------------------------------------------------------------------------------

    def _begin_end(self) -> None:
        """Go no further back: from here on the process ends, whatever fails on the way."""
        self._last.start()
        self._ended = True

    async def _end(
        self,
        verdict: Verdict,
        standings: Sequence[Standing],
        absent: Sequence[Absent],
        headline: str,
    ) -> None:
        """End all ranks that answer, and this one."""
        folder = str(Path(self.config.folder).resolve())
        summary = verdict.summary(self._ranks, standings, absent, headline, folder)
        self._begin_end()
        blameless = [each.rank for each in standings if each.rank not in verdict.suspects]
        speaker = min(blameless or [each.rank for each in standings])
        request = {"ask": "end", "summary": summary, "speaker": speaker}
        others = [self._ranks[each.rank] for each in standings if each.rank != self._me.rank]
        try:
            answers = await asyncio.wait_for(ask_all(others, self._token, request), _TELL_S)
            deaf = {answer.of.rank for answer in answers if isinstance(answer, Absent)}
        except Exception as error:  # what is known is still to be told, by this rank
            logger.warning("the watchdog could not tell the other ranks: %r", error)
            deaf = {speaker}
        self._report(summary, speaks=speaker == self._me.rank or speaker in deaf)
        await asyncio.sleep(_GRACE_S)
        self._release(absent)
        self._leave(EXIT_CODE)

    async def _follow(self, request: dict[str, Any]) -> None:
        """End because another rank's watchdog says so."""
        self._report(str(request["summary"]), speaks=request["speaker"] == self._me.rank)
        await asyncio.sleep(_GRACE_S)
        self._leave(EXIT_CODE)

    def _report(self, summary: str, *, speaks: bool) -> None:
        headline = summary.splitlines()[0]
        folder = str(Path(self.config.folder).resolve())
        problem = write_report(folder, self._me, self._standing(), self.progress, headline)
        lines = [*([summary] if speaks else []), *([problem] if problem else [])]
        if lines:
            print("\n".join(lines), file=sys.__stderr__, flush=True)

    def _release(self, absent: Sequence[Absent]) -> None:
        """Kill stopped ranks of this machine: launchers wait for them in vain."""
        for each in absent:
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
        standings, absent = found
        gone = [each for each in absent if each.gone]
        if not gone:
            return None
        ranks = tuple(each.of.rank for each in gone)
        headline = f"rank {self._me.rank} has lost rank {', '.join(map(str, ranks))}"
        if (broken := self.progress.broken) is not None:
            headline += f" in {broken}, step {self.progress.step}"
        folder = str(Path(self.config.folder).resolve())
        write_report(folder, self._me, self._standing(), self.progress, headline)
        return blame(gone).summary(self._ranks, standings, absent, headline, folder)

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
