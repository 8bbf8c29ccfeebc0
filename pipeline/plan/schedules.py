# SPDX-License-Identifier: Apache-2.0
"""Generators of whole plans, by the names of their schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from wavemare.errors import PlanError, check_number, did_you_mean
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.chunked import forward_only, interleaved, zb_h1, zbv
from wavemare.pipeline.plan.lowering import (
    StageSchedule,
    defer_sends,
    overlap_forward_backward,
)
from wavemare.pipeline.plan.plan import Action, Plan, check_numbers
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

SEND_SLOTS = 2
"""Messages that an engine may have pending in one direction: double buffers. Callers add slack."""

OVERLAP_SLACK = 1
"""Slack (see `ahead`) of 1F1B with overlapped passes. Both passes of a pair end together, so
without slack two neighbours would wait for each other's pair."""


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


def _build(
    schedule: str,
    num_stages: int,
    micro_batches: int,
    num_steps: int,
    *,
    send_slots: int,
    warmup_steps: int,
    drain_interval: int = 0,
    lower: Callable[[Iterable[Action]], Iterable[Action]] = iter,
    **options: Any,
) -> Plan:
    check_numbers(num_stages, micro_batches, num_steps)

    def actions(stage: int) -> Iterable[Action]:
        row = StageSchedule(stage, num_stages, micro_batches, **options)
        for step in range(num_steps):
            rest = num_steps - step
            left = min(steps_to_drain(step, warmup_steps, drain_interval) or rest, rest)
            yield from lower(row.step(row.first + left * micro_batches))

    ranks = tuple(tuple(actions(stage)) for stage in range(num_stages))
    return Plan(schedule, num_stages, micro_batches, num_steps, ranks, send_slots)


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
    overlap: bool = False,
) -> Plan:
    """Return the continuous pipeline: filled once, never flushed, drained at the end.

    Args:
        num_stages: Length of the pipeline, one stage per rank.
        micro_batches: Micro-batches per optimizer step.
        num_steps: Optimizer steps.
        warmup_steps: Number of first steps that are synchronous (PipeMare's T3).
        drain_interval: Steps between drains; 0 for none.
        slack: See `ahead`.
        norms: Whether stages exchange gradient norms.
        correct: See `Versions`.
        overlap: See `overlap_forward_backward`.

    Raises:
        PlanError: A number is out of range.
    """
    check_number(PlanError, "slack", slack, whole=True)
    return _build(
        "pipemare",
        num_stages,
        micro_batches,
        num_steps,
        send_slots=SEND_SLOTS + slack,
        warmup_steps=warmup_steps,
        drain_interval=drain_interval,
        lower=overlap_forward_backward if overlap else iter,
        slack=slack,
        norms=norms,
        correct=correct,
    )


def one_f_one_b(num_stages: int, micro_batches: int, num_steps: int = 1) -> Plan:
    """Return 1F1B as DeepSpeed runs it, with blocking sends; the pipeline is empty at each step.

    Raises:
        PlanError: A number is out of range.
    """
    lower = partial(defer_sends, num_stages=num_stages)
    sizes = num_stages, micro_batches, num_steps
    return _build("1f1b", *sizes, send_slots=0, warmup_steps=num_steps, lower=lower)


def overlapped_one_f_one_b(num_stages: int, micro_batches: int, num_steps: int = 1) -> Plan:
    """Return 1F1B with overlapped passes in its steady state; see `overlap_forward_backward`.

    A stage forwards twice as far ahead as in `one_f_one_b`, and its sends do not block.

    Raises:
        PlanError: A number is out of range.
    """
    return _build(
        "1f1b-paired",
        num_stages,
        micro_batches,
        num_steps,
        send_slots=SEND_SLOTS + OVERLAP_SLACK,
        warmup_steps=num_steps,
        lower=overlap_forward_backward,
        slack=OVERLAP_SLACK,
    )


def inference(num_stages: int, micro_batches: int, num_steps: int = 0) -> Plan:
    """Return forward passes alone.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_stages, micro_batches, num_steps)
    return replace(forward_only(range(num_stages), micro_batches), send_slots=0)


SCHEDULES: dict[str, Callable[..., Plan]] = {
    "1f1b": one_f_one_b,
    "1f1b-paired": overlapped_one_f_one_b,
    "accumulation": accumulation,
    "auto": automatic,
    "in-phase": in_phase,
    "inference": inference,
    "interleaved": interleaved,
    "pipemare": pipemare,
    "tick-tock": tick_tock,
    "zb-h1": zb_h1,
    "zbv": zbv,
}
"""Generators by the names that the command line takes, of (length of the pipeline, micro-batches,
steps). The stages of waves are segments. Those that engines train with are in
`wavemare.pipeline.config.Schedule`."""


def build_plan(
    schedule: str, num_stages: int, micro_batches: int, num_steps: int, **options: Any
) -> Plan:
    """Return a plan by the name of its schedule.

    Args:
        schedule: One of `SCHEDULES`.
        num_stages: Length of the pipeline in ranks; segments of waves.
        micro_batches: Per optimizer step.
        num_steps: Optimizer steps of the plan.
        **options: Those of the schedule's function.

    Raises:
        PlanError: There is no such schedule, or a number is out of range.
    """
    if schedule not in SCHEDULES:
        reason = "there is no such schedule"
        raise PlanError("schedule", schedule, reason, did_you_mean(schedule, SCHEDULES))
    if not num_steps and schedule != "inference":
        raise PlanError("steps", num_steps, "only inference has none", "Give 1 or more")
    return SCHEDULES[schedule](num_stages, micro_batches, num_steps, **options)
