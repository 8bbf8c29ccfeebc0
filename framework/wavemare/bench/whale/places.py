# SPDX-License-Identifier: Apache-2.0
"""Ranks on the devices of a laboratory's hosts in any order."""

from __future__ import annotations

import os

__all__ = ["ORDER", "take_place"]

ORDER = "WAVEMARE_BENCH_ORDER"
"""Variable: the device of each rank, with commas between them."""


def take_place() -> None:
    """Become the rank that this process's device is to run; before the group is joined."""
    order = os.environ.get(ORDER)
    if order is not None:
        device = int(os.environ["RANK"])
        os.environ["RANK"] = str([int(text) for text in order.split(",")].index(device))
