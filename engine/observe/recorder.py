# SPDX-License-Identifier: Apache-2.0
"""Measures where a rank's time goes: computing, stepping, or waiting for a neighbour."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import COMPUTE, RECEIVES, SENDS, Action, Kind

__all__ = ["Recorder"]

_WAITS = frozenset(RECEIVES) | frozenset(SENDS)


class Recorder:
    """Adds up the time of actions; keeps each one on demand.

    The times are those of the host. On an accelerator, which works behind the host, they tell when
    work was issued.

    Attributes:
        keeping: Whether each action's times are kept, for a picture.
        events: The kept actions, in seconds of ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.keeping = False
        self.events: list[Event] = []
        self._busy = 0.0
        self._waiting = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Measure what is done inside."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
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
