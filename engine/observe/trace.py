# SPDX-License-Identifier: Apache-2.0
"""What a rank did in some optimizer steps, and its memory meanwhile, kept for a report.

Records what is reported to the watchdog (`wavemare.engine.observe.progress`) by any engine:
 actions of a plan, passes of the data-parallel engine, evaluations, checkpoints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wavemare.engine.observe.progress import PROGRESS, Progress
from wavemare.files import atomic_write_text
from wavemare.pipeline.plan.action import Action, Kind

__all__ = ["FOLDER", "FORMAT", "StepTrace"]

FORMAT = 1
FOLDER = "timeline"
"""Of the run folder; it has a file ``rank_NNNNN.json`` for each rank."""
_STEP = "train_batch"
_PASSES = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD, "step": Kind.STEP}
"""How the data-parallel engine calls what a pipeline has actions for."""


class StepTrace:
    """Notes what this process does, from `begin` to `end`.

    The times are those of the host, as `wavemare.engine.observe.recorder.Recorder`'s.

    Args:
        memory: Bytes in use now, by default the accelerator's, or without one this process's
            resident memory; called at the end of whatever is noted.
        clock: Seconds from any origin, never going back.
        wall: Seconds since 1970.

    Attributes:
        spans: What was noted: an action or words, its start and its end in seconds of ``clock``,
            and the bytes in use at the end. What is inside of another stands before it.
    """

    def __init__(
        self,
        memory: Callable[[], int] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._memory = memory or _accelerator().memory_allocated
        self._clock = clock
        self._wall = wall
        self.spans: list[tuple[object, float, float, int]] = []
        self._open: list[tuple[object, float, bool]] = []
        self._offset = 0.0

    def begin(self, progress: Progress = PROGRESS) -> None:
        """Follow a process's progress from now on."""
        # All ranks of a host share the monotonic clock; those of several hosts the time of day.
        self._offset = self._wall() - self._clock()
        progress.follower = self

    def end(self, progress: Progress = PROGRESS) -> None:
        """Follow it no longer."""
        progress.follower = None
        self._open.clear()

    def enter(self, what: object) -> None:
        """Note that something begins, which `leave` ends."""
        self._open.append((what, self._clock(), False))

    def at(self, what: object) -> None:
        """Note that the next action begins, and so the one before has ended."""
        self._end_action()
        self._open.append((what, self._clock(), True))

    def leave(self) -> None:
        """Note that what `enter` began has ended."""
        self._end_action()
        if self._open:  # else it began before this trace
            what, start, _ = self._open.pop()
            self.spans.append((what, start, self._clock(), self._memory()))

    def _end_action(self) -> None:
        if self._open and self._open[-1][2]:
            what, start, _ = self._open.pop()
            self.spans.append((what, start, self._clock(), self._memory()))

    def save(self, folder: Path, *, rank: int, stage: int, first_step: int) -> Path:
        """Write what was noted.

        Args:
            folder: The run's.
            rank: Global rank of this process.
            stage: Its stage; 0 without a pipeline.
            first_step: The optimizer step that was the first one noted, from 1.

        Returns:
            The file: ``{"format", "rank", "stage", "first_step", "device", "steps": [[start, end],
            ...], "spans": [[text, start, end, bytes], ...]}``; times in seconds since 1970, an
            action in its text form.
        """
        offset = self._offset
        steps = [[a + offset, b + offset] for what, a, b, _ in self.spans if what == _STEP]
        spans = [
            [name, start + offset, end + offset, used]
            for name, start, end, used in self._named(stage)
        ]
        content: dict[str, Any] = {
            "format": FORMAT,
            "rank": rank,
            "stage": stage,
            "first_step": first_step,
            "device": _accelerator().device_name(),
            "steps": steps,
            "spans": sorted(spans, key=lambda span: (span[1], -span[2])),
        }
        file = folder / FOLDER / f"rank_{rank:05d}.json"
        atomic_write_text(file, json.dumps(content) + "\n")
        return file

    def _named(self, stage: int) -> list[tuple[str, float, float, int]]:
        """Return the spans by name; passes of the data-parallel engine as actions, counted."""
        counts = dict.fromkeys(_PASSES, 0)
        named = []
        for what, start, end, used in self.spans:
            name = _name(what)
            if isinstance(what, str) and what in _PASSES:
                number = counts[what]
                counts[what] += 1
                name = str(Action(_PASSES[what], stage, number))
            if what != _STEP:
                named.append((name, start, end, used))
        return named


def _name(what: object) -> str:
    """Return words, an action's text, or a pair's, such as ``Pair 0B3 0F5``."""
    return str(what).partition("(")[0]  # an instruction of DeepSpeed's without its arguments


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator  # whoever reads traces needs no DeepSpeed

    return get_accelerator()
