# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of itself: where it stands, for how long, and whether it waits for another."""

from __future__ import annotations

import linecache
import sys
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.engine.watchdog.progress import Progress

__all__ = ["Absent", "Standing", "Whereabouts"]

# Calls into these wait for other ranks.
_WAITING_MODULES = (
    "torch.distributed",
    "deepspeed.comm",
    "mpi4py",
    "wavemare.comm.transport",
    "wavemare.engine.messages",
)
# Their C++ parts have no frame: the line that calls them is the innermost one.
_WAITING_CALLS = (".wait(", "synchronize(", ".barrier(", ".item()")
_DEPTH = 8
_AROUND = 3
"""Actions of the plan that are shown on each side of the present one."""


@dataclass(frozen=True)
class Whereabouts:
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
class Absent:
    """A rank that does not tell.

    Args:
        of: Which one.
        gone: Whether its host says that nobody listens any more; else there is no answer at all.
        farewell: What it said when it ended in good order.
    """

    of: Whereabouts
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
class Standing:
    """Where a rank stands.

    Args:
        rank: Global rank.
        what: What it does; an action of the plan if there is one.
        peer: The rank whose message it sends or receives.
        age_s: Seconds since it began with it.
        patience_s: Seconds that this may take.
        outside: Whether it is in no call to an engine.
        waits: Whether it waits for another rank.
        step: Optimizer step, from 1.
        finished: What it finished last.
        line: The innermost line of the script or of wavemare that it is in.
        plan: The actions around the present one, which stands in brackets.
        lock: A file on which it waits for another process, if it does.
    """

    rank: int
    what: str
    peer: int | None
    age_s: float
    patience_s: float
    outside: bool
    waits: bool
    step: int
    finished: str
    line: str
    plan: str
    lock: str | None = None

    @property
    def stalled(self) -> bool:
        """Whether it has been there for longer than it may."""
        return self.age_s >= self.patience_s

    @classmethod
    def of(cls, rank: int, progress: Progress, config: WatchdogConfig) -> Standing:
        """Look at this process; called by another thread than the one that trains."""
        place = progress.place
        frames = _frames(progress.thread)
        return cls(
            rank=rank,
            what=str(place),
            peer=place.peer,
            age_s=progress.age_s,
            patience_s=progress.patience(config.timeout_s, config.start_timeout_s),
            outside=place.outside,
            waits=place.peer is not None or _waits(frames),
            step=progress.step,
            finished=str(progress.finished),
            line=_line(frames),
            plan=_excerpt(progress.plan, progress.position),
            lock=_lock(frames),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `Standing` is made of, by name."""
        return asdict(self)

    def __str__(self) -> str:
        towards = f", with rank {self.peer}" if self.peer is not None else ""
        state = "waits in" if self.waits else "is in"
        lock = f", for the lock {self.lock}" if self.lock else ""
        where = f" at {self.line}" if self.line else ""
        return f"{state} {self.what}{towards}{lock} for {self.age_s:.0f} s, step {self.step}{where}"


def _frames(thread: int | None) -> list[FrameType]:
    """Return the frames of the thread that trains, the innermost first."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _waits(frames: list[FrameType]) -> bool:
    if any(_module(frame).startswith(_WAITING_MODULES) for frame in frames[:_DEPTH]):
        return True
    if not frames:
        return False
    # Between two lines a frame has none.
    code = linecache.getline(frames[0].f_code.co_filename, frames[0].f_lineno or 0)
    return any(call in code for call in _WAITING_CALLS)


def _line(frames: list[FrameType]) -> str:
    """Return the innermost line that is not a library's."""
    for frame in frames:
        file = frame.f_code.co_filename
        if "site-packages" not in file and "/lib/python" not in file and not file.startswith("<"):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
    return ""


def _lock(frames: list[FrameType]) -> str | None:
    """Return the lock file of torch's extension builder in which a process waits."""
    for frame in frames[:_DEPTH]:
        if _module(frame) == "torch.utils.file_baton":
            return str(getattr(frame.f_locals.get("self"), "lock_file_path", None))
    return None


def _excerpt(plan: tuple[str, ...], position: int) -> str:
    if not plan:
        return ""
    first, last = max(position - _AROUND, 0), position + _AROUND + 1
    words = [f"[{a}]" if first + n == position else a for n, a in enumerate(plan[first:last])]
    before, after = "... " if first else "", " ..." if last < len(plan) else ""
    return f"{before}{' '.join(words)}{after}"
