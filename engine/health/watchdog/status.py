# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, and what each writes when the watchdog ends a run."""

from __future__ import annotations

import faulthandler
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from wavemare.engine.observe.progress import Progress

__all__ = ["PeerAddress", "RankStatus", "UnreachablePeer", "write_report"]

_LIBRARIES = ("site-packages", "/lib/python", "/engine/seams.py")
_AROUND = 3
"""Actions of the plan shown on each side of the present one."""
_PER_LINE = 8
"""Actions of the plan in a line of the report."""


@dataclass(frozen=True)
class PeerAddress:
    """The process of a rank, and where its watchdog listens.

    Args:
        rank: Global rank.
        host: Name of its host.
        pid: Its process.
        address: IPv4 address.
        port: TCP port.
        machine: Equal on ranks that share process numbers: one boot, one container.
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
        peer: The rank.
        gone: Whether its host refuses the connection; else there is no answer at all.
        notice: What the rank said when it ended by itself.
    """

    peer: PeerAddress
    gone: bool
    notice: str | None = None

    def __str__(self) -> str:
        if self.notice is not None:
            return f"has ended by itself, {self.notice}"
        if self.gone:
            return "has ended without a word: killed, or out of memory?"
        return "does not answer: stopped, or its host or network is down"


@dataclass(frozen=True)
class RankStatus:
    """What a rank does.

    Args:
        rank: Global rank.
        what: Its action of the plan, or what it does in words.
        peer: The rank whose message it sends or receives.
        wait: What it waits for; empty if it computes.
        waited_s: Seconds for which it has waited.
        step: Optimizer step, from 1.
        finished: What it finished last.
        line: The innermost line of the script or of wavemare.
        plan: The actions around the present one, which stands in brackets.
        notices: Last words of ranks that have ended, by rank.
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
    notices: dict[str, str] = field(default_factory=dict)

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
