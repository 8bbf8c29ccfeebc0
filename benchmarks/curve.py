# SPDX-License-Identifier: Apache-2.0
"""Curves of losses: [[step or seconds, loss], ...]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def first_at(curve: Sequence[Sequence[float]], goal: float) -> float | None:
    """Return where a curve first has a loss, between its points; None if nowhere."""
    for (before, high), (after, low) in pairwise([(0, float("inf")), *curve]):
        if low <= goal:
            return after - (after - before) * (goal - low) / (high - low) if before else after
    return None
