# SPDX-License-Identifier: Apache-2.0
"""How many samples each of several unlike devices takes, so that all are done at once."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

__all__ = ["balanced_shares", "divisors", "linear", "micro_steps", "share_bound"]

Finish = Callable[[int, int], float]
"""From a device and a number of samples to the time at which it is done with them."""


def linear(speeds: Sequence[float], fixed_s: Sequence[float] | None = None) -> Finish:
    """Return the finish times of devices that take ``fixed_s + samples / speed``.

    Args:
        speeds: Samples per second of each device.
        fixed_s: What a device needs however few its samples are; 0 if omitted.
    """
    fixed = fixed_s or [0.0] * len(speeds)
    return lambda device, samples: fixed[device] + samples / speeds[device]


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


def micro_steps(
    samples: int, finish: Finish, caps: Sequence[int], *, quantum: int = 1
) -> tuple[int, tuple[int, ...]] | None:
    """Return the fewest micro-steps whose shares fit into memory as the speeds want them.

    Where a share is above its cap, the samples are cut into micro-steps rather than moved to a
    slower device.

    Returns:
        The number of micro-steps and the shares in each; None where no number will do.
    """
    for count in divisors(samples):
        fitting = balanced_shares(samples // count, finish, caps, quantum=quantum)
        free = balanced_shares(samples // count, finish, [samples] * len(caps), quantum=quantum)
        if fitting is not None and fitting == free:
            return count, fitting
    return None


def share_bound(speeds: Sequence[float]) -> float:
    """Return how many times as fast as equal shares the best ones can be: mean over least speed.

    With as many devices of a type as of another that is rho times as fast it is ``(1 + rho) / 2``.
    """
    return sum(speeds) / (len(speeds) * min(speeds))


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in increasing order."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
