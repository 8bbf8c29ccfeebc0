# SPDX-License-Identifier: Apache-2.0
"""Synchronous schedules with a smaller bubble than 1F1B: several stages per rank, split backward.

A rank has several stages. With `loop` stage ``s`` of ``P`` ranks is on rank ``s % P``. With `vee`
rank ``r`` has stages ``r`` and ``2 P - 1 - r``, so that the first and the last stage share rank 0.
Each schedule is an order of passes, which `lower` completes.

The orders are those of PyTorch 2.13: ``ScheduleInterleaved1F1B`` (Megatron-LM's, arXiv 2104.04473),
``ScheduleInterleavedZeroBubble`` with one stage per rank (ZB-H1, arXiv 2401.10241) and
``ScheduleZBVZeroBubble`` (arXiv 2405.15362).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from wavemare.errors import PlanError, check_number
from wavemare.pipeline.plan.lowering import StageSchedule, lower
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind, Plan, check_numbers

_F, _B = Kind.FORWARD, Kind.BACKWARD
_I, _W = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def loop(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return each stage's rank in a loop: 0, 1, 0, 1 for two ranks and two chunks."""
    return tuple(range(num_ranks)) * chunks


def vee(num_ranks: int) -> tuple[int, ...]:
    """Return each stage's rank in a V: 0, 1, 1, 0 for two ranks."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def passes_to_plan(
    schedule: str,
    homes: Sequence[int],
    ranks: Iterable[Iterable[Action]],
    micro_batches: int,
    num_steps: int,
) -> Plan:
    """Return the plan that repeats the passes of one optimizer step.

    Args:
        schedule: Its name.
        homes: For each stage its rank.
        ranks: For each rank its passes of the first step.
        micro_batches: Per optimizer step.
        num_steps: Optimizer steps.
    """
    repeated = tuple(
        tuple(
            action._replace(micro_batch=action.micro_batch + step * micro_batches)
            for step in range(num_steps)
            for action in row
        )
        for row in map(list, ranks)
    )
    sizes = len(homes), micro_batches, num_steps
    return lower(Plan(schedule, *sizes, repeated, homes=tuple(homes)))


def forward_only(homes: Sequence[int], micro_batches: int) -> Plan:
    """Return forward passes alone, in the order in which they can start.

    Args:
        homes: For each stage its rank.
        micro_batches: How many.
    """
    passes = sorted(
        (stage + number, stage, number)
        for stage in range(len(homes))
        for number in range(micro_batches)
    )
    ranks = tuple(
        tuple(Action(_F, stage, number) for _, stage, number in passes if homes[stage] == rank)
        for rank in range(max(homes) + 1)
    )
    return lower(Plan("inference", len(homes), micro_batches, 0, ranks, homes=tuple(homes)))


def interleaved(num_ranks: int, micro_batches: int, num_steps: int = 1, *, chunks: int = 2) -> Plan:
    """Return interleaved 1F1B: its bubble is that of 1F1B over the number of chunks.

    Args:
        num_ranks: Length of the pipeline.
        micro_batches: Per optimizer step; a multiple of the number of ranks.
        num_steps: Optimizer steps.
        chunks: Stages per rank.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_ranks, micro_batches, num_steps)
    check_number(PlanError, "chunks", chunks, 1, whole=True)
    if micro_batches % num_ranks:
        reason = f"{num_ranks} ranks take {num_ranks} micro-batches at a time"
        raise PlanError("micro_batches", micro_batches, reason, f"Give a multiple of {num_ranks}")

    def passes(rank: int) -> Iterator[Action]:
        rounds = [
            (chunk, range(first, first + num_ranks))
            for first in range(0, micro_batches, num_ranks)
            for chunk in range(chunks)
        ]
        forwards = [Action(_F, c * num_ranks + rank, m) for c, group in rounds for m in group]
        backwards = [
            Action(_B, (chunks - 1 - c) * num_ranks + rank, m) for c, group in rounds for m in group
        ]
        # A rank's lead: all but the last round of a group, and a round trip to the last rank.
        lead = (chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
        yield from forwards[:lead]
        for pair in zip_longest(forwards[lead:], backwards):
            yield from filter(None, pair)

    rows = map(passes, range(num_ranks))
    return passes_to_plan("interleaved", loop(num_ranks, chunks), rows, micro_batches, num_steps)


def zb_h1(num_ranks: int, micro_batches: int, num_steps: int = 1) -> Plan:
    """Return ZB-H1: 1F1B, of which the gradients of the weights fill the last gaps.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_ranks, micro_batches, num_steps)

    def passes(rank: int) -> Iterator[Action]:
        step = StageSchedule(rank, num_ranks, micro_batches).step(micro_batches)
        for kind, stage, m, *_ in step:
            if kind is _B:
                yield Action(_I, stage, m)
                if m >= rank:
                    yield Action(_W, stage, m - rank)
            elif kind in COMPUTE:
                yield Action(kind, stage, m)
        rest = range(max(micro_batches - rank, 0), micro_batches)
        yield from (Action(_W, rank, m) for m in rest)

    rows = map(passes, range(num_ranks))
    return passes_to_plan("zb-h1", range(num_ranks), rows, micro_batches, num_steps)


def zbv(num_ranks: int, micro_batches: int, num_steps: int = 1) -> Plan:
    """Return ZBV: a V of two chunks, with 1F1B's memory on every rank.

    The bubble is smallest with at least twice as many micro-batches as ranks. With fewer, the order
    is that of twice as many, without the passes of the others.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_ranks, micro_batches, num_steps)

    def passes(rank: int) -> Iterator[Action]:
        stages = rank, 2 * num_ranks - 1 - rank
        counts: dict[tuple[Kind, int], int] = {}
        for times, text in _zbv_phases(num_ranks, rank, max(micro_batches, 2 * num_ranks)):
            for word in text.split() * times:
                kind, chunk = Kind(word[0]), int(word[1])
                number = counts.get((kind, chunk), 0)
                counts[kind, chunk] = number + 1
                if number < micro_batches:
                    yield Action(kind, stages[chunk], number)

    rows = map(passes, range(num_ranks))
    return passes_to_plan("zbv", vee(num_ranks), rows, micro_batches, num_steps)


def _zbv_phases(num_ranks: int, rank: int, micro_batches: int) -> list[tuple[int, str]]:
    """Return how often a rank repeats which passes; F0 is the forward pass of its first chunk."""
    behind = num_ranks - 1 - rank  # ranks between this one and the turn of the V
    return [
        # Fill: the first chunk runs ahead until its micro-batch comes back from the turn.
        (2 * behind + 1, "F0"),
        (rank, "F1 F0"),
        (behind + 1, "F1 I1 W1"),
        # Steady state: one pass of each kind of both chunks.
        (micro_batches - 2 * num_ranks + rank + 1, "F0 I0 W0 F1 I1 W1"),
        # Drain: earlier ranks wait for input gradients, so W comes last.
        (behind, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (behind + 1, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]
