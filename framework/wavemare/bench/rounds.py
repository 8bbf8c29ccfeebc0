# SPDX-License-Identifier: Apache-2.0
"""The timed rounds: all systems take turns, in an order that rotates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from wavemare.bench.recorder import Busy, busy_seconds
from wavemare.bench.report import Sample
from wavemare.bench.request import PipelineRequest
from wavemare.bench.systems import SYSTEMS
from wavemare.pipeline.clock.timeline import Event

if TYPE_CHECKING:  # it loads transformers, which other benchmarks' ranks do without
    from wavemare.bench.runner import Runner

__all__ = ["Key", "Round", "rotated", "run_rounds"]

Key = tuple[str, int]
"""A system's name and a number of micro-batches."""

_Item = TypeVar("_Item")


class Round(NamedTuple):
    """What this rank measured in one round of one system.

    Args:
        sample: Its times.
        events: Its actions, if they are noted; absolute times of `time.perf_counter`.
    """

    sample: Sample
    events: Sequence[Event]


def rotated(items: Sequence[_Item], turns: int) -> list[_Item]:
    """Return the items beginning with another one each turn, so that each follows each other."""
    first = turns % len(items)
    return [*items[first:], *items[:first]]


def run_rounds(
    request: PipelineRequest,
    runners: Mapping[Key, Runner],
    on_round: Callable[[int], None],
    clock: Callable[[], float] | None = None,
) -> Iterator[tuple[Key, Round]]:
    """Run all rounds; all ranks must iterate together.

    Args:
        request: What to measure.
        runners: The systems.
        on_round: Told the number of each round, from 0 (which warms up), as it begins.
        clock: Seconds; None for a clock that waits for the accelerator first.

    Yields:
        What this rank measured, for each timed round and system.
    """
    for turn in range(request.rounds + 1):
        on_round(turn)
        for key in rotated(list(runners), turn):
            measured = _run_round(request, key, runners[key], clock or _now)
            if turn > 0:
                yield key, measured


def _run_round(
    request: PipelineRequest, key: Key, runner: Runner, clock: Callable[[], float]
) -> Round:
    name, count = key
    steps = request.steps(count)
    torch.distributed.barrier()
    for _ in range(request.lead(SYSTEMS[name], count)):
        runner.step()
    _take_events(runner)
    # No barrier here: in steady state the ranks are at different points of the same rate.
    started = clock()
    for _ in range(steps):
        runner.step()
    seconds = (clock() - started) / steps
    events = _take_events(runner)
    for _ in range(request.tail(SYSTEMS[name], count)):
        runner.step()
    runner.settle()
    _take_events(runner)
    if runner.recorder is None:
        return Round(Sample(seconds), [])
    busy = Busy(*(total / steps for total in busy_seconds(events)))
    return Round(Sample(seconds, busy), events)


def _take_events(runner: Runner) -> list[Event]:
    return runner.recorder.take() if runner.recorder is not None else []


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()
