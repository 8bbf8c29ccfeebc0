# SPDX-License-Identifier: Apache-2.0
"""What ranks report to each other, why a run hangs, and the report of each rank at its end."""

from __future__ import annotations

import faulthandler
import hmac
import json
import logging
import os
import socket
import socketserver
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from wavemare.engine.launch.environment import address_of_route, host_address
from wavemare.engine.observe.progress import Progress
from wavemare.errors import LaunchError

_LIBRARIES = ("site-packages", "/lib/python", "/engine/seams.py")
_AROUND = 3
"""Actions of the plan shown on each side of the present one."""
_SHOWN = 16
"""Ranks in a summary, so that it fits a screen."""
_PER_LINE = 8
"""Actions of the plan in a line of the report."""


@dataclass(frozen=True)
class PeerAddress:
    """The process of a rank, and where its watchdog listens."""

    rank: int
    host: str
    pid: int
    address: str
    port: int
    machine: str  # equal on ranks that share process numbers: one boot, one container

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True)
class UnreachablePeer:
    """A rank that does not answer."""

    peer: PeerAddress
    gone: bool  # its host refuses the connection; else there is no answer at all
    notice: str | None = None  # what it said when it ended by itself

    def __str__(self) -> str:
        if self.notice is not None:
            return f"has ended by itself, {self.notice}"
        if self.gone:
            return "has ended without a word: killed, or out of memory?"
        return "does not answer: stopped, or its host or network is down"


@dataclass(frozen=True)
class RankStatus:
    """What a rank does."""

    rank: int
    what: str
    peer: int | None  # whose message it sends or receives
    wait: str  # empty if it computes
    waited_s: float
    step: int
    finished: str
    line: str
    plan: str
    notices: dict[str, str] = field(default_factory=dict)  # of ranks that have ended

    @classmethod
    def of(cls, rank: int, progress: Progress, waited_s: float = 0.0) -> RankStatus:
        """Describe this process; called by another thread than the training thread."""
        place, wait = progress.place, progress.wait
        return cls(
            rank=rank,
            what=str(place),
            peer=place.peer,
            wait=wait.what if wait is not None else "",
            waited_s=waited_s,
            step=progress.step,
            finished=str(progress.finished),
            line=_line(progress.thread),
            plan=_excerpt(progress.plan, progress.position),
        )

    def __str__(self) -> str:
        does = f"computes in {self.what}"
        if self.wait:
            towards = f" with rank {self.peer}" if self.peer is not None else ""
            does = f"waits in {self.what}{towards} ({self.wait}) for {self.waited_s:.0f} s"
        where = f" at {self.line}" if self.line else ""
        return f"{does}, step {self.step}{where}"


def _line(thread: int | None) -> str:
    """Return the innermost line of the training thread outside of libraries."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(part in file for part in _LIBRARIES):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _excerpt(plan: tuple[str, ...], position: int) -> str:
    first, last = max(position - _AROUND, 0), position + _AROUND + 1
    words = [f"[{a}]" if first + n == position else a for n, a in enumerate(plan[first:last])]
    before, after = "... " if first and words else "", " ..." if last < len(plan) else ""
    return f"{before}{' '.join(words)}{after}"


@dataclass(frozen=True)
class Diagnosis:
    """Why a run does not go on."""

    suspects: tuple[int, ...]  # none if all ranks wait in the same step
    reason: str
    remedy: str

    def summary(
        self,
        ranks: Sequence[PeerAddress],
        statuses: Sequence[RankStatus],
        unreachable: Sequence[UnreachablePeer],
        headline: str,
        folder: str,
    ) -> str:
        """Return the lines that one rank prints."""
        suspects = [peer for peer in ranks if peer.rank in self.suspects]
        others = [peer for peer in ranks if peer.rank not in self.suspects]
        names = ", ".join(map(str, suspects)) or "no single rank"
        lines = [f"watchdog: {headline}", f"suspect: {names}: {self.reason}"]
        reported = {each.rank: f"{each}" for each in statuses}
        reported |= {each.peer.rank: f"{each}" for each in unreachable}
        plans = {each.rank: each.plan for each in statuses if each.plan}
        for peer in suspects[:_SHOWN] + others[: max(_SHOWN - len(suspects), 1)]:
            lines.append(f"  {peer}: {reported.get(peer.rank, 'was not asked')}")
            if peer.rank in plans:
                lines.append(f"    plan: {plans[peer.rank]}")
        return "\n".join(
            [*lines, f"remedy: {self.remedy}", f"stacks and plans: {folder}/rank_*.txt"]
        )


def diagnose(
    statuses: Sequence[RankStatus],
    unreachable: Sequence[UnreachablePeer],
    lost: Collection[PeerAddress],
    timeout_s: float,
) -> Diagnosis | None:
    """Return why a run does not go on; None while a rank computes or may compute.

    An unreachable rank may compute unless it has been silent for long, and so is ``lost``.
    """
    if any(not status.wait or status.waited_s < timeout_s for status in statuses):
        return None
    if unreachable:
        known = any(each.peer in lost or each.notice is not None for each in unreachable)
        return diagnose_unreachable(unreachable) if known else None
    behind = min(status.step for status in statuses)
    last = tuple(status.rank for status in statuses if status.step == behind)
    if len(last) == len(statuses):
        remedy = "Compare the places above: do all ranks call collectives in the same order?"
        return Diagnosis((), "all ranks wait, in the same step", remedy)
    reason = f"in step {behind}, while others are in a later one"
    return Diagnosis(last, reason, "Give all ranks equally many batches, and the same calls")


def diagnose_unreachable(unreachable: Sequence[UnreachablePeer]) -> Diagnosis:
    """Return that ranks which do not answer hold up the run."""
    first, host = unreachable[0], unreachable[0].peer.host
    if first.notice is not None:
        remedy = "Look at its own output, and give all ranks equally many batches and steps"
    elif first.gone:
        remedy = f"Look at its own output, and at dmesg on {host}"
    else:
        remedy = f"Look at {host}: is it reachable, is process {first.peer.pid} stopped?"
    return Diagnosis(tuple(each.peer.rank for each in unreachable), str(first), remedy)


def write_report(
    folder: str, where: PeerAddress, status: RankStatus, progress: Progress, headline: str
) -> str | None:
    """Write ``rank_NNNNN.txt``: place, last finished action, plan and the stacks of all threads.

    Returns:
        Why it could not be written, or None.
    """
    path = Path(folder) / f"rank_{where.rank:05d}.txt"
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} {where}",
        headline,
        f"{status}",
        f"last finished: {status.finished}",
        *_grid(progress.plan, progress.position),
        f"thread 0x{progress.thread or 0:016x} trains",
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file)
    except OSError as error:
        return f"{where}: no report in {path} ({error.strerror})"
    return None


def _grid(plan: tuple[str, ...], position: int) -> list[str]:
    """Return the plan of this rank's step; the present action stands in brackets."""
    if not plan:
        return []
    words = [f"[{a}]" if n == position else a for n, a in enumerate(plan)]
    width = max(map(len, words)) + 1
    rows = [words[start : start + _PER_LINE] for start in range(0, len(words), _PER_LINE)]
    return ["plan of this step:", *("  " + "".join(f"{w:<{width}}" for w in row) for row in rows)]


LOOPBACK = "127.0.0.1"

_LIMIT = 1 << 20  # bytes of a line
# TCP sends a lost packet again after a second; a busy rank answers late.
_ANSWER_S = 3.0
_AT_ONCE = 64

Request = dict[str, Any]


class Server(socketserver.ThreadingTCPServer):
    """Answers requests that know the job's token, on a free port of all addresses.

    Args:
        token: Returns the secret that the ranks of a job share.
        answer: Maps a request to its answer; both are JSON objects.
    """

    daemon_threads = True
    request_queue_size = 128
    closing = False

    def __init__(self, token: Callable[[], str], answer: Callable[[Request], Request]) -> None:
        super().__init__(("", 0), _Conversation)
        self.token, self.answer = token, answer

    def wake(self) -> None:
        """End the wait for a request; no further one is answered."""
        self.closing = True
        with suppress(OSError):
            socket.create_connection((LOOPBACK, self.server_address[1]), _ANSWER_S).close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a request is answered."""
        return not self.closing

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore what a stranger sends, and callers that hang up."""
        logging.getLogger("wavemare").debug("the watchdog could not answer", exc_info=True)


class _Conversation(socketserver.StreamRequestHandler):
    timeout = _ANSWER_S

    def handle(self) -> None:
        server: Any = self.server
        request = json.loads(self.rfile.readline(_LIMIT))
        known = server.token()
        if known and hmac.compare_digest(str(request.pop("token", "")).encode(), known.encode()):
            self.wfile.write(json.dumps(server.answer(request)).encode() + b"\n")


def ask(peer: PeerAddress, token: str, request: Request) -> Request | UnreachablePeer:
    """Return a rank's answer, or that it gave none within 3 seconds."""
    try:
        with socket.create_connection((peer.address, peer.port), _ANSWER_S) as connection:
            connection.sendall(json.dumps({**request, "token": token}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(_LIMIT)
        if not line:
            return UnreachablePeer(peer, gone=True)  # it was killed just now
        return json.loads(line)
    except ConnectionError:
        return UnreachablePeer(peer, gone=True)
    except (OSError, ValueError):
        return UnreachablePeer(peer, gone=False)


def ask_all(
    peers: Sequence[PeerAddress], token: str, request: Request
) -> list[Request | UnreachablePeer]:
    """Ask many ranks, 64 at a time; the answers are in the order of the ranks."""
    if not peers:
        return []
    # Not an executor of concurrent.futures: those refuse work while the interpreter ends.
    with ThreadPool(min(len(peers), _AT_ONCE)) as pool:
        return pool.map(partial(ask, token=token, request=request), peers)


def reachable_address() -> str:
    """Return the address of this host that the other ranks reach."""
    address = LOOPBACK
    # The master's name may be unknown here, or of IPv6 alone.
    with suppress(OSError):
        address = address_of_route(os.environ.get("MASTER_ADDR", LOOPBACK))
    # LOCAL_SIZE is set by DeepSpeed's launcher.
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))
    one_host = here is not None and here == os.environ.get("WORLD_SIZE")
    if not one_host and address.startswith("127."):
        with suppress(LaunchError):
            return host_address(os.environ)
    return address
