# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of waves that are not drained between them."""

from __future__ import annotations

from typing import Any

from wavemare.pipeline.action import Action, Kind
from wavemare.pipeline.wave import tick_tock_step

__all__ = ["closing_actions", "open_step"]


def open_step(
    num_segments: int, micro_batches: int, step: int, *, carries_on: bool, **options: Any
) -> tuple[Action, ...]:
    """Return a step of tick-tock that leaves its last micro-batch to go backward in the next step.

    That of the step before goes backward beside the first forward pass of this one:

        (B_M of the last step with F_1) | (B_1 with F_2) | ... | (B_(M-1) with F_M)

    Args:
        num_segments: With the head.
        micro_batches: Per optimizer step.
        step: Counted from 0.
        carries_on: Whether the last micro-batch of the step before is under way.
        options: See `tick_tock`.

    Raises:
        PlanError: A number is out of range.
    """
    head, before = num_segments - 1, step * micro_batches - 1
    actions = []
    for action in tick_tock_step(num_segments, micro_batches + 1, 0, **options):
        kind, segment, number = action.kind, action.stage, action.micro_batch
        of_before = number == 0 and (not carries_on or kind is Kind.FORWARD or segment == head)
        of_next = number == micro_batches and kind is Kind.BACKWARD and segment < head
        if kind in (Kind.FORWARD, Kind.BACKWARD) and not of_before and not of_next:
            micro_batch = before + number
            actions.append(Action(kind, segment, micro_batch, wave=micro_batch % 2))
    return tuple(actions)


def closing_actions(num_segments: int, micro_batch: int) -> tuple[Action, ...]:
    """Return the passes that a micro-batch which `open_step` has left still needs."""
    segments = range(num_segments - 2, -1, -1)
    return tuple(Action(Kind.BACKWARD, s, micro_batch, wave=micro_batch % 2) for s in segments)
