# SPDX-License-Identifier: Apache-2.0
"""Tokens per second and time left, over the last steps rather than the whole run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

__all__ = ["Speed"]


class Speed:
    """Rates over a sliding window, so that a slow start or an evaluation fades away.

    Args:
        window: Number of latest steps to measure over.
        clock: Seconds from any origin, never going back.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=window + 1)

    def start(self, step: int) -> None:
        """Begin to measure, after the given number of steps."""
        self._marks.clear()
        self._marks.append((self._clock(), step, 0))

    def advance(self, step: int, tokens: int) -> None:
        """Note that a step has ended.

        Args:
            step: Steps done.
            tokens: Tokens of this step, over all ranks.
        """
        total = self._marks[-1][2] if self._marks else 0
        self._marks.append((self._clock(), step, total + tokens))

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first step has ended."""
        seconds, _, tokens = self._window()
        return tokens / seconds if seconds > 0 else None

    def seconds_left(self, total: int) -> float | None:
        """Return the time until step ``total`` at the present speed; None if it is not known."""
        seconds, steps, _ = self._window()
        if seconds <= 0 or steps <= 0:
            return None
        return (total - self._marks[-1][1]) * seconds / steps

    def _window(self) -> tuple[float, int, int]:
        if not self._marks:
            return 0.0, 0, 0
        first, last = self._marks[0], self._marks[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]
