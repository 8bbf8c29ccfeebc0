# SPDX-License-Identifier: Apache-2.0
"""Plans by name: 1F1B, PipeMare (with warm-up and drains), inference, and waves on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wavemare.errors import PlanError, did_you_mean
from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.lowering import add_communication, defer_sends, pair_passes
from wavemare.pipeline.plan.order import Stream
from wavemare.pipeline.plan.plan import Plan, check_numbers
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

__all__ = [
    "PAIR_SLACK",
    "SCHEDULES",
    "SEND_SLOTS",
    "build_plan",
    "drain_boundary",
    "inference",
    "one_f_one_b",
    "one_f_one_b_stage",
    "paired_one_f_one_b",
    "paired_one_f_one_b_stage",
    "pipemare",
    "steps_to_drain",
]

SEND_SLOTS = 2
"""Messages that the asynchronous engine may have under way in one direction: double buffers, and
as many more as there is slack."""


PAIR_SLACK = 1
"""Slack (see `ahead`) of 1F1B with pairs. A pair ends both its passes at once, so that without any
slack each of two neighbours would wait for the other's pair."""


def steps_to_drain(step: int, warmup_steps: int, drain_interval: int) -> int | None:
    """Return after how many optimizer steps the pipeline is empty; None if nothing empties it.

    Args:
        step: The optimizer step that comes next, counted from 0.
        warmup_steps: The pipeline is emptied after each of so many first steps.
        drain_interval: Steps between drains after that; 0 for none.
    """
    if step < warmup_steps:
        return 1
    return drain_interval - step % drain_interval if drain_interval else None


def drain_boundary(
    step: int,
    first: int,
    micro_batches: int,
    *,
    warmup_steps: int = 0,
    drain_interval: int = 0,
    last_step: int | None = None,
) -> int | None:
    """Return how many micro-batches of the run may be forwarded before the pipeline is empty again.

    Args:
        step: The optimizer step that comes next, counted from 0.
        first: Its first micro-batch.
        micro_batches: Micro-batches per optimizer step.
        warmup_steps: The pipeline is emptied after each of so many first steps.
        drain_interval: Steps between drains after that; 0 for none.
        last_step: One behind the last step of the run; None if it has no known end.
    """
    left = steps_to_drain(step, warmup_steps, drain_interval)
    ends = [steps for steps in (left, last_step and last_step - step) if steps is not None]
    return first + min(ends) * micro_batches if ends else None


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
        warmup_steps: So many first steps are synchronous (PipeMare's T3).
        drain_interval: Steps between drains; 0 for none.
        slack: See `ahead`.
        norms: See `add_steps`.
        correct: See `Versions`.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_stages, micro_batches, num_steps)
    if slack < 0:
        raise PlanError("slack", slack, "it is negative", "Give 0 or more")

    def actions(stage: int) -> tuple[Action, ...]:
        stream = Stream(stage, num_stages, micro_batches, norms=norms, correct=correct, slack=slack)
        result: list[Action] = []
        for step in range(num_steps):
            result += stream.window(
                drain_boundary(
                    step,
                    stream.first,
                    micro_batches,
                    warmup_steps=warmup_steps,
                    drain_interval=drain_interval,
                    last_step=num_steps,
                )
            )
        return tuple(result)

    ranks = tuple(actions(stage) for stage in range(num_stages))
    return Plan("pipemare", num_stages, micro_batches, num_steps, ranks, SEND_SLOTS + slack)


def one_f_one_b(num_stages: int, micro_batches: int, num_steps: int = 1) -> Plan:
    """Return 1F1B as DeepSpeed runs it, with blocking sends; the pipeline is empty at each step.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_stages, micro_batches, num_steps)
    ranks = tuple(
        tuple(one_f_one_b_stage(stage, num_stages, micro_batches, num_steps))
        for stage in range(num_stages)
    )
    return Plan("1f1b", num_stages, micro_batches, num_steps, ranks)


def one_f_one_b_stage(
    stage: int, num_stages: int, micro_batches: int, num_steps: int = 1
) -> Iterator[Action]:
    """Return one stage's part of `one_f_one_b`."""
    stream = Stream(stage, num_stages, micro_batches)
    for _ in range(num_steps):
        window = stream.window(stream.first + micro_batches)
        yield from defer_sends(window, num_stages)


def paired_one_f_one_b(num_stages: int, micro_batches: int, num_steps: int = 1) -> Plan:
    """Return 1F1B with the passes of its steady state in pairs; see `pair_passes`.

    A stage forwards twice as far ahead as in `one_f_one_b`, and its sends do not block.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_stages, micro_batches, num_steps)
    ranks = tuple(
        tuple(paired_one_f_one_b_stage(stage, num_stages, micro_batches, num_steps))
        for stage in range(num_stages)
    )
    slots = SEND_SLOTS + PAIR_SLACK
    return Plan("1f1b-paired", num_stages, micro_batches, num_steps, ranks, slots)


def paired_one_f_one_b_stage(
    stage: int, num_stages: int, micro_batches: int, num_steps: int = 1
) -> Iterator[Action]:
    """Return one stage's part of `paired_one_f_one_b`."""
    stream = Stream(stage, num_stages, micro_batches, slack=PAIR_SLACK)
    for _ in range(num_steps):
        yield from pair_passes(stream.window(stream.first + micro_batches))


def inference(num_stages: int, micro_batches: int, num_steps: int = 0) -> Plan:
    """Return forward passes alone.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_stages, micro_batches, num_steps)

    def actions(stage: int) -> tuple[Action, ...]:
        passes = (Action(Kind.FORWARD, stage, m, 0) for m in range(micro_batches))
        return tuple(add_communication(passes, num_stages))

    ranks = tuple(actions(stage) for stage in range(num_stages))
    return Plan("inference", num_stages, micro_batches, 0, ranks)


SCHEDULES: dict[str, Callable[[int, int, int], Plan]] = {
    "1f1b": one_f_one_b,
    "1f1b-paired": paired_one_f_one_b,
    "accumulation": accumulation,
    "in-phase": in_phase,
    "inference": inference,
    "pipemare": pipemare,
    "tick-tock": tick_tock,
}
"""Generators by the names that the command line takes; the stages of waves are segments."""


def build_plan(schedule: str, num_stages: int, micro_batches: int, num_steps: int) -> Plan:
    """Return a plan by the name of its schedule.

    Args:
        schedule: One of `SCHEDULES`.
        num_stages: One for each rank of a pipeline.
        micro_batches: Per optimizer step.
        num_steps: Optimizer steps that the plan has.

    Raises:
        PlanError: There is no such schedule, or a number is out of range.
    """
    if schedule not in SCHEDULES:
        reason = "there is no such schedule"
        raise PlanError("schedule", schedule, reason, did_you_mean(schedule, SCHEDULES))
    return SCHEDULES[schedule](num_stages, micro_batches, num_steps)
