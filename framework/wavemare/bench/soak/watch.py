# SPDX-License-Identifier: Apache-2.0
"""What a long run must not do: learn something else after a fault, or grow."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

__all__ = ["Losses", "Sizes", "left_behind", "shared_memory_segments"]

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SAMPLES = 9
_KIB_IN_MIB = 2**10


class Losses:
    """Follows ``metrics.jsonl``, and compares what is trained twice: before a death and after.

    Args:
        file: Of the run.

    Attributes:
        by_step: The losses so far.
        lines: How many losses were read as they were written.
        repeated: How many steps were trained again.
        different: Those that had another loss then, with both losses.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = 0
        self._offset = 0
        self.by_step: dict[int, float] = {}
        self.lines = 0
        self.repeated = 0
        self.different: list[tuple[int, float, float]] = []
        self._last = 0

    def update(self) -> None:
        """Read what is new. Another file is one that a restart has cut off at its checkpoint."""
        try:
            inode = self._file.stat().st_ino
            with self._file.open("rb") as file:
                cut = inode != self._inode
                file.seek(0 if cut else self._offset)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # it is being written
        self._offset = sum(map(len, lines)) + (0 if cut else self._offset)
        self._inode = inode
        for text in lines:
            line = json.loads(text)
            if "loss" in line:
                self._note(int(line["step"]), line["loss"], again=not cut)

    def _note(self, step: int, loss: float, *, again: bool) -> None:
        self.lines += again
        known = self.by_step.setdefault(step, loss)
        if known != loss:
            self.different.append((step, known, loss))
        elif again and step <= self._last:
            self.repeated += 1
        self._last = max(self._last, step)


@dataclass
class Sizes:
    """What one process of an attempt holds, over time.

    Args:
        pid: The process.
        warmup_s: Seconds after `begin` that do not count.

    Attributes:
        segments: Of shared memory that it has had.
    """

    pid: int
    warmup_s: float
    samples: list[dict[str, float]] = field(default_factory=list)
    segments: set[str] = field(default_factory=set)
    _since: float = math.inf

    def begin(self) -> None:
        """Note that it trains: how long it starts up depends on the machine."""
        self._since = min(self._since, time.monotonic())

    def sample(self) -> None:
        """Look at the process, if it lives and has warmed up."""
        self.segments |= shared_memory_segments(self.pid)
        if time.monotonic() - self._since < self.warmup_s:
            return
        try:
            process = psutil.Process(self.pid)
            with process.oneshot():
                sample = {
                    "memory_mib": _memory_of_no_file(self.pid) / _KIB_IN_MIB,
                    "files": float(process.num_fds()),
                    "threads": float(process.num_threads()),
                    "children": float(len(process.children())),
                }
        except (psutil.Error, OSError):
            return
        self.samples.append(sample)

    def growth(self) -> dict[str, float]:
        """Return by how much the last third of the samples exceeds the first one, relatively.

        Of memory the medians are compared, as a background save holds a copy of the weights for a
        moment; of what is counted the least, as that save is a thread with open files. Empty if
        there are too few samples.
        """
        third = len(self.samples) // 3
        if len(self.samples) < _LEAST_SAMPLES:
            return {}
        first, last = self.samples[:third], self.samples[-third:]

        def typical(samples: Sequence[dict[str, float]], key: str) -> float:
            of = statistics.median if key == "memory_mib" else min
            return of(sample[key] for sample in samples)

        return {
            key: (typical(last, key) - typical(first, key)) / max(typical(first, key), 1.0)
            for key in self.samples[0]
        }


def _memory_of_no_file(pid: int) -> int:
    """Return the KiB that a process holds beside pages of files, such as those of libraries.

    These become its own when the last other process that has them ends: a rank's peer, perhaps.
    """
    # Anonymous pages stand in ``status``, too, but are not counted exactly there on many cores.
    files = [Path(f"/proc/{pid}/{name}") for name in ("smaps_rollup", "status")]
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return sum(map(int, re.findall(r"^(?:Anonymous|RssShmem):\s*(\d+) kB$", text, re.MULTILINE)))


def shared_memory_segments(pid: int) -> set[str]:
    """Return the segments of shared memory that a process has mapped, by their names."""
    with suppress(OSError):  # it has ended
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        return set(re.findall(rf"{_SHARED_MEMORY}/(\S+)$", maps, re.MULTILINE))
    return set()


def left_behind(segments: Iterable[str]) -> set[str]:
    """Return those of some segments that are still there."""
    return {name for name in segments if (_SHARED_MEMORY / name).exists()}
