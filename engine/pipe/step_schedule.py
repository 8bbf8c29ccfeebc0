# SPDX-License-Identifier: Apache-2.0
"""A stage's actions of one optimizer step as instructions of DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.runtime.pipe import schedule

from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.lowering import paired

__all__ = ["INSTRUCTIONS", "Pair", "Window"]


class _Instruction(schedule.PipeInstruction):
    """An action of a plan, for DeepSpeed's interpreter; one subclass for each kind."""


INSTRUCTIONS = {kind: type(f"Plan{kind.name.title()}", (_Instruction,), {}) for kind in Kind}
"""For each kind its instruction, whose method gets the ``action``."""


class Pair(schedule.PipeInstruction):
    """A ``backward`` pass and the ``forward`` pass after it, run together."""


class Window(schedule.PipeSchedule):
    """The actions of one optimizer step of one stage, as a DeepSpeed schedule.

    Args:
        actions: In their order.
        pairs: Whether passes that follow each other are run together.
    """

    def __init__(self, actions: Sequence[Action], *, pairs: bool) -> None:
        self._actions = list(paired(actions)) if pairs else [(action,) for action in actions]

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """Yield one instruction after the other."""
        for action, *others in self._actions:
            if others:
                yield [Pair(backward=action, forward=others[0])]
            else:
                yield [INSTRUCTIONS[action.kind](action=action)]

    def num_pipe_buffers(self) -> int:
        """Return 0: micro-batches are held by their number, not in DeepSpeed's buffers."""
        return 0
