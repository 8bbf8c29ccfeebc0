# SPDX-License-Identifier: Apache-2.0
"""Where a chain of layers is cut for stages of unlike devices, and in which order these stand.

A dynamic program over (devices used so far, layers placed so far). Which devices were used says
how many stages there are, and with that how many micro-batches the next one keeps; so that the best
order of types needs no enumeration of orders: one state serves all orders of the same devices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Combine = Callable[[Any, Any], Any]

# How much above the least possible one the slowest stage may be where that makes the sum of all
# stages, which counts once a step, smaller.
_SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2)


@dataclass(frozen=True)
class StageProblem:
    """What layers cost on each type of device.

    Args:
        seconds: (types, layers): forward and backward pass of one micro-batch.
        static_bytes: (layers,): weights and what belongs to them.
        activation_bytes: (layers,): what one micro-batch keeps.
        memory_bytes: (types,): what a device holds.
        hop_s: (types,): what a stage that is not the first one needs for its messages.
        in_flight: (stages,): micro-batches that the stage keeps at a time.
    """

    seconds: Array
    static_bytes: Array
    activation_bytes: Array
    memory_bytes: Array
    hop_s: Array
    in_flight: tuple[int, ...]

    def stage_times(self) -> list[Array]:
        """Return for each stage the times of layers [i, j) as (types, j, i); inf if impossible."""
        seconds = _spans(self.seconds)  # (types, L+1, L+1), of layers [i, j)
        static, kept = _spans(self.static_bytes), _spans(self.activation_bytes)
        size = seconds.shape[-1]
        forwards = np.arange(size)[:, None] < np.arange(size)[None, :]
        times = []
        for place, count in enumerate(self.in_flight):
            memory = static + count * kept
            fits = forwards & (memory <= self.memory_bytes[:, None, None])
            hop = self.hop_s[:, None, None] if place else 0.0
            table = np.where(fits, seconds + hop, np.inf)
            # The program takes minima over i: in this order they lie side by side.
            times.append(np.ascontiguousarray(table.swapaxes(1, 2)))
        return times


class Cut(NamedTuple):
    """Layers of unlike stages.

    Args:
        bounds: Stage ``s`` holds the layers ``[bounds[s], bounds[s + 1])``.
        order: The type of each stage's device.
        stage_s: The time of each stage for one micro-batch, with its messages.
    """

    bounds: tuple[int, ...]
    order: tuple[int, ...]
    stage_s: tuple[float, ...]

    @property
    def slowest_s(self) -> float:
        """The time of the slowest stage."""
        return max(self.stage_s)


def pipeline_s(stage_s: Sequence[float], micro_steps: int, schedule: str = "1f1b") -> float:
    """Return the time of a step: the first micro-batch passes all stages, the others the slowest.

    An asynchronous pipeline never drains, so that all its micro-batches are others.
    """
    if schedule == "pipemare":
        return micro_steps * max(stage_s)
    return sum(stage_s) + (micro_steps - 1) * max(stage_s)


def cut_stages(problem: StageProblem, order: Sequence[int]) -> Cut | None:
    """Return the cut whose slowest stage is fastest, for devices in a given order.

    ``f[p + 1][j] = min over i of max(f[p][i], seconds(i, j) + hop)`` where the memory suffices.

    Returns:
        The cut; None where no cut fits into memory or there are fewer layers than stages.
    """
    times = problem.stage_times()
    best = _start(times)
    choices = []
    for place, kind in enumerate(order):
        values = np.maximum(best, times[place][kind])
        choices.append(values.argmin(axis=1))
        best = values.min(axis=1)
    if not np.isfinite(best[-1]):
        return None
    bounds = [len(best) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return _cut(times, order, bounds[::-1])


def best_order(
    problem: StageProblem, counts: Sequence[int], micro_steps: int, limit_s: float = math.inf
) -> Cut | None:
    """Return the cut and the order of devices with the shortest step.

    Among all orders and cuts the slowest stage is made as fast as can be; then, as what the other
    stages take counts once a step, the sum of all stages is made small at that and at slightly
    slower slowest stages, and the shortest step of these is taken.

    Args:
        problem: The costs.
        counts: For each type the number of its devices; their sum is the number of stages.
        micro_steps: Micro-batches of a step.
        limit_s: A step that is of interest. Where the slowest stage alone takes longer, the sum is
            left as it is.

    Returns:
        The cut; None where none fits into memory.
    """
    times = problem.stage_times()
    found = _over_orders(times, counts, np.maximum)
    if found is None:
        return None
    alike = sum(count > 0 for count in counts) == 1  # the sum is the same however they are cut
    if alike or micro_steps * found.slowest_s > limit_s:
        return found
    candidates = [found]
    for slack in _SLACKS:
        limit = found.slowest_s * slack * (1 + 1e-12)
        limited = [np.where(table <= limit, table, np.inf) for table in times]
        cut = _over_orders(limited, counts, np.add)
        if cut is not None:
            candidates.append(cut)
    return min(candidates, key=lambda cut: pipeline_s(cut.stage_s, micro_steps))


def _over_orders(times: Sequence[Array], counts: Sequence[int], combine: Combine) -> Cut | None:
    """Return the best cut over all orders; the value of stages so far is made by ``combine``."""
    empty = (0,) * len(counts)
    values = {empty: _start(times)}
    rows = np.arange(len(values[empty]))
    choices: dict[tuple[int, ...], tuple[NDArray[np.intp], NDArray[np.intp]]] = {}
    # The devices used so far, fewer first, without the state of none.
    states = product(*(range(count + 1) for count in counts))
    for used in sorted((state for state in states if sum(state)), key=sum):
        place = sum(used) - 1
        kinds = [kind for kind, count in enumerate(used) if count]
        tables = [combine(values[_without(used, kind)], times[place][kind]) for kind in kinds]
        starts = np.stack([table.argmin(axis=1) for table in tables])
        lowest = np.stack([table[rows, at] for table, at in zip(tables, starts, strict=True)])
        kind_of = lowest.argmin(axis=0)
        values[used] = lowest[kind_of, rows]
        choices[used] = np.asarray(kinds)[kind_of], starts[kind_of, rows]
    used = tuple(counts)
    end = len(values[empty]) - 1
    if not np.isfinite(values[used][end]):
        return None
    bounds, order = [end], []
    while sum(used):
        kind_of, starts = choices[used]
        order.append(int(kind_of[bounds[-1]]))
        bounds.append(int(starts[bounds[-1]]))
        used = _without(used, order[-1])
    return _cut(times, order[::-1], bounds[::-1])


def _without(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] - 1, *used[kind + 1 :])


def _start(times: Sequence[Array]) -> Array:
    start: Array = np.full(times[0].shape[-1], np.inf)
    start[0] = 0.0
    return start


def _cut(times: Sequence[Array], order: Sequence[int], bounds: Sequence[int]) -> Cut:
    stage_s = (
        float(times[place][kind, bounds[place + 1], bounds[place]])
        for place, kind in enumerate(order)
    )
    return Cut(tuple(bounds), tuple(order), tuple(stage_s))


def _spans(values: Array) -> Array:
    """Return sums over [i, j), (..., L+1, L+1), from values of layers, (..., L)."""
    totals = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], -1)
    return totals[..., None, :] - totals[..., :, None]


Finish = Callable[[int, int], float]
"""From a device and a number of samples to the time at which it is done with them."""


def balanced_shares(
    samples: int, finish: Finish, caps: Sequence[int], *, least: int = 0
) -> tuple[int, ...] | None:
    """Return the shares whose latest device is done first.

    The next samples go to the device that would be done with them first, taken from a heap. Since
    a device's finish time grows with its samples, this is exact: all increments that end before the
    latest one are taken, in whatever order.

    Args:
        samples: To be shared out.
        finish: Grows with the number of samples, for every device.
        caps: For each device the most that its memory holds.
        least: What each device gets in any case.

    Returns:
        For each device its samples; of equal finish times the device that comes first is served.
        None where the caps are too low.
    """
    left = samples - least * len(caps)
    if left < 0 or any(cap < least for cap in caps):
        return None
    shares = [least] * len(caps)
    heap = [
        (finish(device, least + 1), device) for device, cap in enumerate(caps) if least + 1 <= cap
    ]
    heapq.heapify(heap)
    for _ in range(left):
        if not heap:
            return None
        _, device = heap[0]
        shares[device] += 1
        if shares[device] + 1 <= caps[device]:
            heapq.heapreplace(heap, (finish(device, shares[device] + 1), device))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in increasing order."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
