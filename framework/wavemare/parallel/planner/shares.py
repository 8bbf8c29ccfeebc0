# SPDX-License-Identifier: Apache-2.0
"""How many samples each of several unlike devices takes, so that all are done at once."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

__all__ = ["balanced_shares", "divisors"]

Finish = Callable[[int, int], float]
"""From a device and a number of samples to the time at which it is done with them."""


def balanced_shares(
    samples: int,
    finish: Finish,
    caps: Sequence[int],
    *,
    quantum: int = 1,
    least: int = 0,
) -> tuple[int, ...] | None:
    """Return the shares whose latest device is done first.

    The next samples go to the device that would be done with them first, taken from a heap. Since
    a device's finish time grows with its samples, this is exact: all increments that end before the
    latest one are taken, in whatever order.

    Args:
        samples: To be shared out.
        finish: Grows with the number of samples, for every device.
        caps: For each device the most that its memory holds.
        quantum: Every share is ``least`` plus a multiple of it.
        least: What each device gets in any case.

    Returns:
        For each device its samples; of equal finish times the device that comes first is served.
        None where the caps are too low or the numbers do not divide.
    """
    left = samples - least * len(caps)
    if left < 0 or left % quantum or any(cap < least for cap in caps):
        return None
    shares = [least] * len(caps)
    heap = [
        (finish(device, least + quantum), device)
        for device, cap in enumerate(caps)
        if least + quantum <= cap
    ]
    heapq.heapify(heap)
    for _ in range(left // quantum):
        if not heap:
            return None
        _, device = heap[0]
        shares[device] += quantum
        if shares[device] + quantum <= caps[device]:
            heapq.heapreplace(heap, (finish(device, shares[device] + quantum), device))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in increasing order."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
