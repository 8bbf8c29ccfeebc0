# SPDX-License-Identifier: Apache-2.0
"""What a check of ``wavemare doctor`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Status"]

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        check: What was looked at.
        status: ``fail`` if a run cannot work, ``warn`` if one may surprise.
        value: What was found.
        remedy: What to do about it; empty if nothing.
    """

    check: str
    status: Status
    value: str
    remedy: str = ""
