# SPDX-License-Identifier: Apache-2.0
"""Schedules: which passes each rank does, in which order. `lower` adds everything else.

With 1F1B and PipeMare each rank has one stage. Before the backward pass of micro-batch ``m``, stage
``s`` of ``P`` has forwarded all micro-batches up to ``m + P - 1 - s`` (`ahead`), unless the
pipeline is emptied before. 1F1B empties it at each optimizer step. PipeMare idles only while it
fills.

Other schedules have several stages on a rank. With `loop` stage ``s`` of ``P`` ranks is on rank
``s % P``. With `vee` rank ``r`` has stages ``r`` and ``2 P - 1 - r``, so that the first and the
last stage share rank 0. Their orders are those of PyTorch 2.13: ``ScheduleInterleaved1F1B``
(Megatron-LM's, arXiv 2104.04473), ``ScheduleInterleavedZeroBubble`` with one stage per rank (ZB-H1,
arXiv 2401.10241) and ``ScheduleZBVZeroBubble`` (arXiv 2405.15362).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest

from wavemare.errors import PlanError, check_number
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.plan import Action, Kind, Plan, check_numbers

SEND_SLOTS = 2
"""Messages that PipeMare may have pending in one direction, without slack: double buffers."""

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


@cache
def ahead(stage: int, num_stages: int, slack: int = 0) -> int:
    """Return how many micro-batches a stage forwards ahead of its backward passes.

    It is also the delay of the stage's gradients in micro-batches (d_i of PipeMare's delay model
    for a pipeline that does one pass at a time).

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        slack: Extra micro-batches in flight for each later stage. With 0, no message
            latency is hidden: HARP's 1F1B (arXiv 2509.24859) warms up so for slow links.
    """
    return (num_stages - 1 - stage) * (1 + slack)


def _one_by_one(stage: int, lead: int, ends: Iterable[int]) -> Iterator[Action]:
    """Yield a stage's forward and backward passes in turns, with a lead of forward passes.

    Args:
        stage: Counted from 0.
        lead: See `ahead`.
        ends: The numbers of micro-batches after which the pipeline is empty, increasing.
    """
    forwarded = first = 0
    for end in ends:
        for micro_batch in range(first, end):
            limit = min(micro_batch + lead + 1, end)
            for forward in range(forwarded, limit):
                yield Action(_F, stage, forward)
            forwarded = max(forwarded, limit)
            yield Action(_B, stage, micro_batch)
        first = end


def one_f_one_b(num_ranks: int, micro_batches: int, num_steps: int = 1, *, slack: int = 0) -> Plan:
    """Return 1F1B: the passes of DeepSpeed's and Megatron-LM's order, one stage per rank.

    Args:
        num_ranks: Length of the pipeline.
        micro_batches: Per optimizer step.
        num_steps: Optimizer steps.
        slack: See `ahead`.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_ranks, micro_batches, num_steps)
    check_number(PlanError, "slack", slack, whole=True)
    rows = (_one_by_one(r, ahead(r, num_ranks, slack), [micro_batches]) for r in range(num_ranks))
    plan = passes_to_plan("1f1b", range(num_ranks), rows, micro_batches, num_steps)
    return replace(plan, send_slots=plan.send_slots + slack)


def steps_to_drain(step: int, warmup_steps: int, drain_interval: int) -> int | None:
    """Return after how many optimizer steps the pipeline is empty; None if nothing empties it.

    Args:
        step: The next optimizer step, counted from 0.
        warmup_steps: Number of first steps after each of which the pipeline is emptied.
        drain_interval: Steps between drains after the warm-up; 0 for none.
    """
    if step < warmup_steps:
        return 1
    return drain_interval - step % drain_interval if drain_interval else None


def pipemare(
    num_stages: int,
    micro_batches: int,
    num_steps: int,
    *,
    warmup_steps: int = 0,
    drain_interval: int = 0,
    slack: int = 0,
    norms: bool = False,
    correct: bool = False,
) -> Plan:
    """Return the continuous pipeline: filled once, never flushed, drained at the end.

    Args:
        num_stages: Length of the pipeline, one stage per rank.
        micro_batches: Micro-batches per optimizer step.
        num_steps: Optimizer steps.
        warmup_steps: Number of first steps that are synchronous (PipeMare's T3).
        drain_interval: Steps between drains; 0 for none.
        slack: See `ahead`.
        norms: See `lower`.
        correct: See `lower`.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_stages, micro_batches, num_steps)
    check_number(PlanError, "slack", slack, whole=True)
    drains = (s for s in range(num_steps) if steps_to_drain(s, warmup_steps, drain_interval) == 1)
    ends = sorted({(step + 1) * micro_batches for step in (*drains, num_steps - 1)})
    ranks = tuple(
        tuple(_one_by_one(stage, ahead(stage, num_stages, slack), ends))
        for stage in range(num_stages)
    )
    plan = Plan("pipemare", num_stages, micro_batches, num_steps, ranks, SEND_SLOTS + slack)
    return lower(plan, flush=False, norms=norms, correct=correct)


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


def inference(num_ranks: int, micro_batches: int, num_steps: int = 0) -> Plan:
    """Return forward passes alone, of one stage per rank.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_ranks, micro_batches, num_steps)
    return forward_only(range(num_ranks), micro_batches)


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
        for action in _one_by_one(rank, ahead(rank, num_ranks), [micro_batches]):
            m = action.micro_batch
            if action.kind is _F:
                yield action
                continue
            yield Action(_I, rank, m)
            if m >= rank:
                yield Action(_W, rank, m - rank)
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
