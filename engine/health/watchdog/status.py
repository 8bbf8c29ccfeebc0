# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of itself: what it does, and for how long it has waited for other ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from wavemare.engine.observe.progress import Progress

__all__ = ["PeerAddress", "RankStatus", "UnreachablePeer"]

_NOT_SHOWN = ("site-packages", "/lib/python", "engine/health/watchdog/marks.py")
_AROUND = 3
"""Actions of the plan that are shown on each side of the present one."""


@dataclass(frozen=True)
class PeerAddress:
    """Which process a rank is, and where its watchdog listens.

    Args:
        rank: Global rank.
        host: Name of its host.
        pid: Its process.
        address: IPv4 address.
        port: TCP port.
        machine: Equal where process numbers mean the same processes: one boot, one container.
    """

    rank: int
    host: str
    pid: int
    address: str
    port: int
    machine: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True)
class UnreachablePeer:
    """A rank that does not answer.

    Args:
        of: Which one.
        gone: Whether its host says that nobody listens any more; else there is no answer at all.
        farewell: What it said when it ended in good order.
    """

    of: PeerAddress
    gone: bool
    farewell: str | None = None

    @property
    def is_unexplained(self) -> bool:
        """Whether it has ended without a word."""
        return self.gone and self.farewell is None

    def __str__(self) -> str:
        if self.farewell is not None:
            return f"has ended by itself, {self.farewell}"
        if self.gone:
            return "has ended without a word: killed, or out of memory?"
        return "does not answer: stopped, or its host or the way there is down"


@dataclass(frozen=True)
class RankStatus:
    """What a rank does.

    Args:
        rank: Global rank.
        what: What it does; an action of the plan if there is one.
        peer: The rank whose message it sends or receives.
        wait: What it waits for; empty if it computes.
        waited_s: Seconds for which it has waited.
        step: Optimizer step, from 1.
        finished: What it finished last.
        line: The innermost line of the script or of wavemare that it is in.
        plan: The actions around the present one, which stands in brackets.
    """

    rank: int
    what: str
    peer: int | None
    wait: str
    waited_s: float
    step: int
    finished: str
    line: str
    plan: str

    @classmethod
    def of(cls, rank: int, progress: Progress, waited_s: float = 0.0) -> RankStatus:
        """Look at this process; called by another thread than the one that trains."""
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
        does, towards = f"computes in {self.what}", ""
        if self.wait:
            towards = f" with rank {self.peer}" if self.peer is not None else ""
            does = f"waits in {self.what}{towards} ({self.wait}) for {self.waited_s:.0f} s"
        where = f" at {self.line}" if self.line else ""
        return f"{does}, step {self.step}{where}"


def _line(thread: int | None) -> str:
    """Return the innermost line of the thread that trains that is not a library's."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(part in file for part in _NOT_SHOWN):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _excerpt(plan: tuple[str, ...], position: int) -> str:
    if not plan:
        return ""
    first, last = max(position - _AROUND, 0), position + _AROUND + 1
    words = [f"[{a}]" if first + n == position else a for n, a in enumerate(plan[first:last])]
    before, after = "... " if first else "", " ..." if last < len(plan) else ""
    return f"{before}{' '.join(words)}{after}"
