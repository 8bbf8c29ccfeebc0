# SPDX-License-Identifier: Apache-2.0
"""Statistics of a collective, and of all collectives of a step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Statistics", "Totals"]


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
        actual_s: Measured seconds.
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


@dataclass
class Totals:
    """All calls since the last `take`, at most the latest 65,536."""

    calls: deque[Statistics] = field(default_factory=lambda: deque(maxlen=1 << 16))

    def add(self, statistics: Statistics) -> None:
        """Add a call."""
        self.calls.append(statistics)

    def take(self) -> Mapping[str, float]:
        """Return figures by name, and drop the calls.

        Densities are means weighted by the bytes of the buckets; ``sparse_calls_EXECUTOR`` counts
        calls. Empty if there was no call.
        """
        # Keep the deque: another thread may be appending to it.
        calls = [self.calls.popleft() for _ in range(len(self.calls))]
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
