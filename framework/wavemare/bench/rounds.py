# SPDX-License-Identifier: Apache-2.0
"""Interleaved rounds: all systems take turns, in an order that rotates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypeVar

import torch.distributed as dist

from wavemare.bench.request import Request

__all__ = ["gather", "interleaved", "ratio_row"]

_Item = TypeVar("_Item")


def interleaved(
    request: Request, items: Sequence[_Item], note: Callable[[str], None]
) -> Iterator[tuple[bool, _Item]]:
    """Yield the items of all rounds; each round begins with another item.

    Args:
        request: Has the numbers of rounds.
        items: Systems, or other things to measure in turns.
        note: Shows a line as a round begins.

    Yields:
        Whether the round is timed (after the warm-ups), and the item.
    """
    for turn in range(request.warmups + request.rounds):
        number = turn - request.warmups + 1
        note("warming up" if number < 1 else f"round {number} of {request.rounds}")
        first = turn % len(items)
        for item in (*items[first:], *items[:first]):
            yield number > 0, item


def gather(value: Any) -> list[Any]:
    """Return every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def ratio_row(rounds_s: Sequence[float], baseline_s: Sequence[float] | None) -> dict[str, Any]:
    """Return the part of a row that all benchmarks share.

    Args:
        rounds_s: Seconds of each round.
        baseline_s: Those of the baseline; None without it.
    """
    own = median(rounds_s)
    return {
        "median_s": own,
        "ratio": None if baseline_s is None else median(baseline_s) / own,
        "rounds_s": list(rounds_s),
    }
