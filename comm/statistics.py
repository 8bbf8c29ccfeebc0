# SPDX-License-Identifier: Apache-2.0
"""Statistics of a collective, and of all collectives of a step."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

_READING = Lock()


class Timer:
    """Measures a piece of work: on a GPU the work itself, between events of the current stream.

    Args:
        device: Where the work is; it begins now.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begin = self._now()

    def stop(self) -> None:
        """The work is complete, or launched."""
        self._end = self._now()

    @property
    def ended(self) -> bool:
        """Whether the GPU has done the work; the host does not wait."""
        return not self._on_gpu or self._end.query()

    @property
    def seconds(self) -> float:
        """Of work that has ended."""
        return (
            self._begin.elapsed_time(self._end) / 1e3 if self._on_gpu else self._end - self._begin
        )

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class Statistics:
    """Statistics of one call.

    Attributes:
        executor: Its name.
        payload_bytes: Bytes of the bucket.
        density: Mean share of a rank's non-zero blocks; None without masks.
        union: Share of the blocks that are non-zero on some rank; None without masks.
        bytes_up: Bytes that this rank sent, masks included.
        bytes_down: Bytes that this rank received.
        predicted_s: Predicted seconds; None without a prediction.
        actual_s: Measured seconds; on a GPU known when it has ended, as those of the phases.
        phases_s: Seconds of ``mask``, ``metadata``, ``plan``, ``pack``, ``push``, ``reduce``,
            ``pull``, ``unpack``, ``dense``.
    """

    executor: str = ""
    payload_bytes: int = 0
    density: float | None = None
    union: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    predicted_s: float | None = None
    actual_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    _running: deque[tuple[str | None, Timer]] = field(default_factory=deque, repr=False)

    def add(self, phase: str, seconds: float) -> None:
        """Add the time of a phase."""
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds

    def note(self, phase: str | None, timer: Timer) -> None:
        """Stop a timer of a phase, or of the whole call."""
        timer.stop()
        self._running.append((phase, timer))
        self.read_timers()

    def read_timers(self) -> bool:
        """Fill in the times of what has ended; whether that is everything."""
        with _READING:  # the caller and the thread of the collectives may both look
            while self._running and self._running[0][1].ended:
                phase, timer = self._running.popleft()
                if phase is None:
                    self.actual_s = timer.seconds
                else:
                    self.add(phase, timer.seconds)
            return not self._running


class Totals:
    """Sums over all calls since the last `take`; calls that have ended are not kept.

    Attributes:
        num_calls: Number of calls so far, whether taken or not.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending: deque[Statistics] = deque()
        self._lock = Lock()  # threads of collectives add, and another one takes
        self._begin()

    def _begin(self) -> None:
        self._figures: defaultdict[str, float] = defaultdict(float)
        self._looked: defaultdict[str, int] = defaultdict(int)

    def add(self, call: Statistics) -> None:
        """Add a call; on a GPU it counts from when it has ended."""
        with self._lock:
            self.num_calls += 1
            self._pending.append(call)
            self._count_ended()

    def _count_ended(self) -> None:
        while self._pending and self._pending[0].read_timers():
            self._count(self._pending.popleft())

    def _count(self, call: Statistics) -> None:
        figures = self._figures
        figures["sparse_payload_bytes"] += call.payload_bytes
        figures["sparse_bytes_up"] += call.bytes_up
        figures["sparse_bytes_down"] += call.bytes_down
        figures["sparse_seconds"] += call.actual_s
        figures[f"sparse_calls_{call.executor}"] += 1
        if call.predicted_s is not None:
            figures["sparse_predicted_seconds"] += call.predicted_s
        for name, share in (("sparse_density", call.density), ("sparse_union", call.union)):
            if share is not None and call.payload_bytes:
                figures[name] += share * call.payload_bytes
                self._looked[name] += call.payload_bytes

    def take(self) -> Mapping[str, float]:
        """Return figures of the calls that have ended by name, and begin anew.

        Densities are means weighted by the bytes of the buckets; ``sparse_calls_EXECUTOR`` counts
        calls. Empty if there was no call.
        """
        with self._lock:
            self._count_ended()
            figures = dict(self._figures)
            for name, looked in self._looked.items():
                figures[name] /= looked
            self._begin()
        return figures
