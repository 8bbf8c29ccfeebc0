# SPDX-License-Identifier: Apache-2.0
"""The optimizer steps that waves run, from plans that passed `check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind, Plan
from wavemare.pipeline.plan.run_plan import repeat_micro_batch
from wavemare.pipeline.wave.schedule import tick_tock_step

_SIZE = 4
"""Micro-batches per step of a checked plan; of more, each is like its second, in its own wave."""

_STEPS = 3
"""Optimizer steps of a checked plan of open steps: first, and two like all that follow."""


@lru_cache(maxsize=4)
def checked_step(
    make: Callable[..., Plan], num_segments: int, micro_batches: int, **options: Any
) -> list[Action]:
    """Return one optimizer step of waves that are drained at its end.

    Args:
        make: A generator of `wavemare.pipeline.wave.schedule`.
        num_segments: With the head.
        micro_batches: Per optimizer step.
        options: Of the generator; hashable.

    Raises:
        PlanError: A number is out of range, or the plan is wrong.
    """
    plan = make(num_segments, min(micro_batches, _SIZE), 1, **options)
    check(plan)
    return _repeated(plan.ranks[0], plan, micro_batches, 0)


def open_tick_tock(
    num_segments: int, micro_batches: int, num_steps: int, **options: Any
) -> tuple[Plan, list[tuple[Action, ...]]]:
    """Return a plan of tick-tock in which each step's last micro-batch ends in the next step.

    It goes backward during the first forward pass of the next step. Its step's gradients are
    reduced during the passes that follow, and applied at the start of the step after.

        S_(n-2) | B_M of step n-1 with F_1 | R_(n-1) | B_1 with F_2 | ... | B_(M-1) with F_M

    Args:
        num_segments: With the head, 2 or more.
        micro_batches: Per optimizer step.
        num_steps: Optimizer steps; the plan ends drained.
        options: See `tick_tock`.

    Returns:
        The plan, and its actions step by step; the last ones finish the last step.

    Raises:
        PlanError: A number is out of range.
    """

    def updates(kind: Kind, step: int) -> list[Action]:
        last = (step + 1) * micro_batches - 1
        return [Action(kind, s, last) for s in range(num_segments)] if step >= 0 else []

    def passes(step: int) -> Iterable[Action]:
        before = step * micro_batches - 1
        for action in tick_tock_step(num_segments, micro_batches + 1, 0, **options):
            kind, segment, number = action.kind, action.stage, action.micro_batch
            backward_below_head = kind is Kind.BACKWARD and segment < num_segments - 1
            of_before = number == 0 and not (step > 0 and backward_below_head)
            of_next = number == micro_batches and backward_below_head
            beyond = step == num_steps and number > 0
            if kind in (Kind.REDUCE, Kind.STEP) or of_before or of_next or beyond:
                continue
            micro_batch = before + number
            yield Action(kind, segment, micro_batch, wave=micro_batch % 2)
            if kind is Kind.BACKWARD and segment == 0 and number == 0:
                yield from updates(Kind.REDUCE, step - 1)

    steps = [(*updates(Kind.STEP, k - 2), *passes(k)) for k in range(num_steps + 1)]
    steps[-1] += tuple(updates(Kind.STEP, num_steps - 1))
    ranks = (tuple(action for step in steps for action in step),)
    return Plan(
        "tick-tock-open", num_segments, micro_batches, num_steps, ranks, step_delay=1
    ), steps


@dataclass(frozen=True)
class OpenSteps:
    """The steps of a run of `open_tick_tock` of any length.

    Args:
        micro_batches: Per optimizer step.
        plan: The checked plan.
        steps: Its actions step by step.
    """

    micro_batches: int
    plan: Plan
    steps: list[tuple[Action, ...]]

    @classmethod
    @lru_cache(maxsize=4)
    def make(cls, num_segments: int, micro_batches: int, **options: Any) -> OpenSteps:
        """Make and check the plan; see `open_tick_tock`. Options are hashable."""
        plan, steps = open_tick_tock(num_segments, min(micro_batches, _SIZE), _STEPS, **options)
        check(plan)
        return cls(micro_batches, plan, steps)

    def step(self, number: int, *, carries_on: bool) -> list[Action]:
        """Return the actions of an optimizer step.

        Args:
            number: Of the run, counted from 0.
            carries_on: Whether the previous step's last micro-batch is unfinished.
        """
        place = _STEPS - 1 if carries_on else 0
        moved = number * self.micro_batches - place * self.plan.micro_batches
        return _repeated(self.steps[place], self.plan, self.micro_batches, moved, place)

    def closing(self, number: int) -> list[Action]:
        """Return the actions that finish a step's last micro-batch."""
        moved = (number + 1) * self.micro_batches - _STEPS * self.plan.micro_batches
        return _repeated(self.steps[-1], self.plan, self.plan.micro_batches, moved)


def _repeated(
    actions: Iterable[Action], plan: Plan, micro_batches: int, moved: int, step: int = 0
) -> list[Action]:
    """Return the actions of a step with its micro-batches, from another one on."""
    extra = micro_batches - plan.micro_batches
    middle = step * plan.micro_batches + 1
    moved_actions = []
    for action in repeat_micro_batch(tuple(actions), plan.num_stages - 1, middle, extra):
        number = action.micro_batch + moved
        wave = number % 2 if action.kind in (*COMPUTE, Kind.LOAD) else 0
        moved_actions.append(action._replace(micro_batch=number, wave=wave))
    return moved_actions
