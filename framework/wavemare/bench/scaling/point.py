# SPDX-License-Identifier: Apache-2.0
"""One point of a curve."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Point"]


@dataclass(frozen=True)
class Point:
    """What so many processes take.

    Args:
        system: Which.
        processes: Stages or ranks.
        seconds: Of a step or of a sum.
    """

    system: str
    processes: int
    seconds: float
