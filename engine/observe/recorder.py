# SPDX-License-Identifier: Apache-2.0
"""Measures where a rank's time goes, and reports it to the first stage with the gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from wavemare.pipeline.plan.lowering import Pair

__all__ = ["Recorder", "StageReport", "Telemetry"]

_WAITS = frozenset(RECEIVES) | frozenset(SENDS)


class Recorder:
    """Adds up the time of actions, and keeps each one on demand.

    Times are the host's: with an accelerator they show when work was launched, not when it ran.

    Attributes:
        keeping: Whether to keep each action's times, for a picture.
        events: The kept actions, in seconds of ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.keeping = False
        self.events: list[Event] = []
        self._busy = 0.0
        self._waiting = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def action(self, action: Action | Pair) -> Iterator[None]:
        """Measure the code inside; a pair counts as computing, and is not kept."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        if isinstance(action, Pair):
            self._busy += end - start
            return
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            self._busy += end - start
        elif action.kind in _WAITS:
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


@dataclass(frozen=True)
class StageReport:
    """One optimizer step of one stage.

    Args:
        busy: Share of the time in which it computed or stepped.
        waiting: Share of the time in which it waited for a neighbour.
        staleness: Mean of the step's micro-batches, in optimizer steps.
        update_gap: Norm of the difference between the newest weights and the oldest that a forward
            pass under way has seen, over the norm of the weights; nan where it is not known.
    """

    busy: float = math.nan
    waiting: float = math.nan
    staleness: float = math.nan
    update_gap: float = math.nan


_FIELDS = len(astuple(StageReport()))


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

    @property
    def num_numbers(self) -> int:
        """How many numbers `pack` returns."""
        return _FIELDS * len(self.reports)

    def pack(self) -> list[float]:
        """Return all reports known here, as numbers."""
        return [number for report in self.reports for number in astuple(report)]

    def unpack(self, numbers: Sequence[float]) -> None:
        """Take the reports of the later stages."""
        for stage in range(self._stage + 1, len(self.reports)):
            place = stage * _FIELDS
            self.reports[stage] = StageReport(*numbers[place : place + _FIELDS])

    def note_staleness(self, staleness: int) -> None:
        """Note the staleness of a micro-batch at its backward pass."""
        self._staleness.append(staleness)

    @property
    def mean_staleness(self) -> float:
        """Of the present step's micro-batches so far; 0 before the first one."""
        noted = self._staleness
        return sum(noted) / len(noted) if noted else 0.0

    def end_step(self, shares: tuple[float, float], update_gap: float) -> None:
        """Make this stage's report of a step.

        Args:
            shares: Of the time: busy, and waiting.
            update_gap: See `StageReport`.
        """
        self.reports[self._stage] = StageReport(*shares, self.mean_staleness, update_gap)
        self._staleness = []

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
            metrics[f"update_gap_{stage}"] = report.update_gap
        return {name: value for name, value in metrics.items() if not math.isnan(value)}
