# SPDX-License-Identifier: Apache-2.0
"""Measures where a rank's time goes: for the first stage, and as a trace of some steps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from wavemare.engine.observe.progress import PROGRESS, Progress
from wavemare.files import atomic_write_text
from wavemare.pipeline.clock.simulate import Event
from wavemare.pipeline.plan.plan import COMPUTE, RECEIVES, SENDS, Action, Kind

_WORK = COMPUTE | {Kind.STEP}
_WAITS = frozenset(RECEIVES) | frozenset(SENDS)


class Recorder:
    """Adds up the time of actions, and keeps each one on demand.

    Times are the host's: with an accelerator they show when work was launched, not when it ran,
    unless the clock waits for it.

    Attributes:
        clock: Returns seconds from any origin, never going back.
        keeping: Whether to keep each action's times, for a picture.
        events: The kept actions, in seconds of ``clock``.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self.keeping = False
        self.events: list[Event] = []
        self._outer = self.keeping, self.events
        self._busy = 0.0
        self._waiting = 0.0
        self._since = time.perf_counter()

    def begin_keeping(self, clock: Callable[[], float]) -> None:
        """Keep actions from now on, by another clock."""
        self._outer = self.keeping, self.events
        self.clock, self.keeping, self.events = clock, True, []

    def end_keeping(self) -> list[Event]:
        """Return the actions that were kept, and go on as before."""
        events = self.events
        self.clock, (self.keeping, self.events) = time.perf_counter, self._outer
        return events

    def add(self, action: Action, start: float, end: float) -> None:
        """Add an action's time."""
        kind = action.kind
        if kind in _WORK:
            self._busy += end - start
        elif kind in _WAITS:
            self._waiting += end - start
        if self.keeping:
            self.events.append(Event(action, start, end))

    def shares(self) -> tuple[float, float]:
        """Return the shares of time that were busy and waiting since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self._since, 1e-9)
        result = self._busy / elapsed, self._waiting / elapsed
        self._busy = self._waiting = 0.0
        self._since = now
        return result


class StageReport(NamedTuple):
    """One optimizer step of one stage.

    Args:
        busy: Share of the time in which it computed or stepped.
        waiting: Share of the time in which it waited for a neighbour.
        staleness: Mean of the step's micro-batches, in optimizer steps.
    """

    busy: float = math.nan
    waiting: float = math.nan
    staleness: float = math.nan


_FIELDS = len(StageReport._fields)


class Telemetry:
    """Collects the reports of this stage and all later ones.

    Args:
        stage: This stage.
        num_stages: Length of the pipeline.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage = stage
        self.reports = [StageReport()] * num_stages
        self._staleness: list[int] = []

    def pack(self) -> list[float]:
        """Return all reports known here, as numbers."""
        return list(chain.from_iterable(self.reports))

    def unpack(self, numbers: Sequence[float]) -> None:
        """Take the reports of the later stages."""
        later = self._stage + 1
        self.reports[later:] = [
            StageReport(*numbers[place : place + _FIELDS])
            for place in range(later * _FIELDS, len(numbers), _FIELDS)
        ]

    def begin_step(self) -> None:
        """Forget the micro-batches of the step before, which may have failed."""
        self._staleness.clear()

    def note_staleness(self, staleness: int) -> None:
        """Note the staleness of a micro-batch at its backward pass."""
        self._staleness.append(staleness)

    @property
    def mean_staleness(self) -> float:
        """Of the present step's micro-batches so far; 0 before the first one."""
        noted = self._staleness
        return sum(noted) / len(noted) if noted else 0.0

    def end_step(self, shares: tuple[float, float]) -> None:
        """Make this stage's report of a step, given the shares of time: busy, and waiting."""
        self.reports[self._stage] = StageReport(*shares, self.mean_staleness)

    def metrics(self) -> dict[str, float]:
        """Return the figures of all stages, by name; on the first stage they are complete.

        ``bubble`` is the mean share of time in which stages did not compute, and
        ``bubble_predicted`` the part of it that the unevenness of the stages explains: the slowest
        one never waits in a pipeline that is never flushed.
        """
        busy = [report.busy for report in self.reports]
        metrics = {}
        if not any(map(math.isnan, busy)) and max(busy) > 0:
            metrics["bubble"] = 1 - sum(busy) / len(busy)
            metrics["bubble_predicted"] = 1 - sum(busy) / len(busy) / max(busy)
        for stage, report in enumerate(self.reports):
            metrics[f"staleness_{stage}"] = report.staleness
            metrics[f"waiting_{stage}"] = report.waiting
        return {name: value for name, value in metrics.items() if not math.isnan(value)}


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
            # DeepSpeed's instructions have arguments.
            name = str(what).partition("(")[0]
            if isinstance(what, str) and what in _PASSES:
                number = counts[what]
                counts[what] += 1
                name = str(Action(_PASSES[what], stage, number))
            if what != _STEP:
                named.append((name, start, end, used))
        return named


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator  # whoever reads traces needs no DeepSpeed

    return get_accelerator()
