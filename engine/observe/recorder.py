# SPDX-License-Identifier: Apache-2.0
"""Measures where a rank's time goes: computing, stepping, or waiting for a neighbour."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from wavemare.pipeline.plan.lowering import Pair

__all__ = ["Recorder"]

_WAITS = frozenset(RECEIVES) | frozenset(SENDS)


class Recorder:
    """Adds up the time of actions, and keeps each one on demand.

    Times are the host's. An accelerator works behind the host: they then tell when it got its work.

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
