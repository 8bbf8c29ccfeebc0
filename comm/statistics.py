# SPDX-License-Identifier: Apache-2.0
"""Statistics of a collective, and of all collectives of a step."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


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
        while self._running and self._running[0][1].ended:
            phase, timer = self._running.popleft()
            if phase is None:
                self.actual_s = timer.seconds
            else:
                self.add(phase, timer.seconds)
        return not self._running


@dataclass
class Totals:
    """All calls since the last `take`, at most the latest 65,536."""

    calls: deque[Statistics] = field(default_factory=lambda: deque(maxlen=1 << 16))

    def take(self) -> Mapping[str, float]:
        """Return figures of the calls that have ended by name, and drop these.

        Densities are means weighted by the bytes of the buckets; ``sparse_calls_EXECUTOR`` counts
        calls. Empty if there was no call.
        """
        # Keep the deque: another thread may be appending to it.
        calls = []
        while self.calls and self.calls[0].read_timers():
            calls.append(self.calls.popleft())
        if not calls:
            return {}
        figures: dict[str, float] = {
            "sparse_payload_bytes": sum(call.payload_bytes for call in calls),
            "sparse_bytes_up": sum(call.bytes_up for call in calls),
            "sparse_bytes_down": sum(call.bytes_down for call in calls),
            "sparse_seconds": sum(call.actual_s for call in calls),
        }
        foreseen = [call for call in calls if call.predicted_s is not None]
        if foreseen:
            figures["sparse_predicted_seconds"] = sum(call.predicted_s or 0.0 for call in foreseen)
        for name in ("density", "union"):
            looked = [(getattr(c, name), c.payload_bytes) for c in calls]
            known = [(share, size) for share, size in looked if share is not None]
            total = sum(size for _, size in known)
            if total:
                figures[f"sparse_{name}"] = sum(share * size for share, size in known) / total
        for executor, count in Counter(call.executor for call in calls).items():
            figures[f"sparse_calls_{executor}"] = count
        return figures
