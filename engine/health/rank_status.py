# SPDX-License-Identifier: Apache-2.0
"""What a rank says of itself, why a run does not go on, and the report of each rank at its end."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wavemare.engine.observe.progress import Progress

_OTHERS = (
    "site-packages",
    "/lib/python",
    "wavemare/engine/seams.py",
    "wavemare/engine/health/",
    "wavemare/failure.py",
)
_AROUND = 3
"""Actions of the plan shown on each side of the present one."""
_SHOWN = 16
"""Ranks in a summary, so that it fits a screen."""
_PER_LINE = 8
"""Actions of the plan in a line of the report."""


@dataclass(frozen=True)
class RankStatus:
    """The process of a rank, and what it does."""

    rank: int
    host: str
    pid: int
    machine: str  # equal on ranks that share process numbers: one boot, one container
    beat: int = 0  # grows as long as its watchdog runs
    what: str = ""
    peer: int | None = None  # whose message it sends or receives
    wait: str = ""  # empty if it computes
    waited_s: float = 0.0
    step: int = 0
    line: str = ""
    plan: str = ""
    left: str = ""  # what it says when it ends by itself
    # As the rank that reads this sees it:
    late: bool = False  # it has said nothing new since the last look
    silent: bool = False  # for so long that it is lost
    ended: bool = False  # its process has

    def at(self, progress: Progress, waited_s: float, beat: int) -> RankStatus:
        """Return what this process does now; called by another thread than the training thread."""
        place, wait, broken = progress.place, progress.wait, progress.broken
        return replace(
            self,
            beat=beat,
            what=f"{place}, after an error in {broken}" if broken is not None else f"{place}",
            peer=place.peer,
            wait=wait.what if wait is not None else "",
            waited_s=waited_s,
            step=progress.step,
            line=_line(progress.thread),
            plan=_excerpt(progress.actions, progress.position),
        )

    @property
    def name(self) -> str:
        """Rank and process, in words."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def waits(self) -> bool:
        """Whether it certainly waits: else it computes, or may compute, or does nothing more."""
        return bool(self.wait) and not self.late and not self.absence

    @property
    def absence(self) -> str:
        """Why it says nothing more; empty if it goes on, as far as is known."""
        if self.left:
            return f"has ended by itself, {self.left}"
        if self.ended:
            return "has ended without a word: killed, or out of memory?"
        return "does not answer: stopped or killed, or its host or network is down" * self.silent

    @property
    def lines(self) -> list[str]:
        """What it does, and where in its plan: lines of a summary."""
        plan = [f"    plan: {self.plan}"] if self.plan and not self.left else []
        return [f"  {self.name}: {self}", *plan]

    def __str__(self) -> str:
        does = f"computes in {self.what}"
        if self.wait:
            towards = f" with rank {self.peer}" if self.peer is not None else ""
            does = f"waits in {self.what}{towards} ({self.wait}) for {self.waited_s:.0f} s"
        where = f" at {self.line}" if self.line else ""
        does = f"{does}, step {self.step}{where}"
        if self.left or not (self.absence or self.late):
            return self.absence or does
        return f"{self.absence or 'says nothing new'} (its last word: {does})"


def _line(thread: int | None) -> str:
    """Return the innermost line of the training thread, but of no library and no report."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(part in file for part in _OTHERS):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _excerpt(plan: Sequence[object], position: int) -> str:
    first, last = max(position - _AROUND, 0), position + _AROUND + 1
    words = [f"[{a}]" if first + n == position else f"{a}" for n, a in enumerate(plan[first:last])]
    before, after = "... " if first and words else "", " ..." if last < len(plan) else ""
    return f"{before}{' '.join(words)}{after}"


@dataclass(frozen=True)
class Diagnosis:
    """Why a run does not go on."""

    suspects: tuple[int, ...]  # none if all ranks wait in the same step
    reason: str
    remedy: str

    def summary(self, ranks: Sequence[RankStatus], headline: str, folder: str) -> str:
        """Return the lines that one rank prints, about the ranks of which it knows."""
        suspects = [each for each in ranks if each.rank in self.suspects]
        others = [each for each in ranks if each.rank not in self.suspects]
        names = ", ".join(each.name for each in suspects) or "no single rank"
        lines = [f"watchdog: {headline}", f"suspect: {names}: {self.reason}"]
        for each in suspects[:_SHOWN] + others[: max(_SHOWN - len(suspects), 1)]:
            lines += each.lines
        return "\n".join(
            [*lines, f"remedy: {self.remedy}", f"stacks and plans: {folder}/rank_*.txt"]
        )


def diagnose(ranks: Sequence[RankStatus], timeout_s: float) -> Diagnosis | None:
    """Return why a run does not go on; None while a rank computes or may compute."""
    absent = [each for each in ranks if each.absence]
    present = [each for each in ranks if not each.absence]
    if not all(each.waits and each.waited_s >= timeout_s for each in present):
        return None
    if absent:
        return diagnose_absence(absent)
    behind = min(each.step for each in present)
    last = tuple(each.rank for each in present if each.step == behind)
    if len(last) == len(present):
        remedy = "Compare the places above: do all ranks call collectives in the same order?"
        return Diagnosis((), "all ranks wait, in the same step", remedy)
    reason = f"in step {behind}, while others are in a later one"
    return Diagnosis(last, reason, "Give all ranks equally many batches, and the same calls")


def diagnose_absence(absent: Sequence[RankStatus]) -> Diagnosis:
    """Return that ranks which say nothing more hold up the run."""
    first = absent[0]
    remedy = f"Look at {first.host}: is it reachable, is process {first.pid} stopped?"
    if first.left:
        remedy = "Look at its own output, and give all ranks equally many batches and steps"
    elif first.ended:
        remedy = f"Look at its own output, and at dmesg on {first.host}"
    return Diagnosis(tuple(each.rank for each in absent), first.absence, remedy)


def write_report(folder: str, status: RankStatus, progress: Progress, headline: str) -> str | None:
    """Write ``rank_NNNNN.txt``: place, last finished action, plan and the stacks of all threads.

    Returns:
        Why it could not be written, or None.
    """
    path = Path(folder) / f"rank_{status.rank:05d}.txt"
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} {status.name}",
        headline,
        f"{status}",
        f"last finished: {progress.finished}",
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
        return f"{status.name}: no report in {path} ({error.strerror})"
    return None


def _grid(plan: tuple[str, ...], position: int) -> list[str]:
    """Return the plan of this rank's step; the present action stands in brackets."""
    if not plan:
        return []
    words = [f"[{a}]" if n == position else a for n, a in enumerate(plan)]
    width = max(map(len, words)) + 1
    rows = [words[start : start + _PER_LINE] for start in range(0, len(words), _PER_LINE)]
    return ["plan of this step:", *("  " + "".join(f"{w:<{width}}" for w in row) for row in rows)]
