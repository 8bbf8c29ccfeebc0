# SPDX-License-Identifier: Apache-2.0
"""Runs a stage's part of a checked plan, action by action, and notes each one.

An engine has a method ``_exec_<kind>`` for each kind of action in its plans. DeepSpeed's own
schedules, of evaluations and DualPipeV, run here too, by DeepSpeed's instruction map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed.runtime.pipe import schedule

from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.observe.recorder import Recorder
from wavemare.pipeline.plan.action import RECEIVES, SENDS, Action
from wavemare.pipeline.plan.lowering import Pair, in_pairs

__all__ = ["PlanInterpreter", "StepSchedule"]

_NEIGHBOURS = {kind: distance for kind, (_, distance) in (SENDS | RECEIVES).items()}


class StepSchedule(schedule.PipeSchedule):
    """A stage's actions of one optimizer step.

    Args:
        actions: In their order.
        overlap: Whether to run adjacent backward and forward passes together.
        buffers: DeepSpeed's buffers that the actions use.
    """

    def __init__(
        self, actions: Sequence[Action], *, overlap: bool = False, buffers: int = 0
    ) -> None:
        self.actions = in_pairs(actions) if overlap else list(actions)
        self._buffers = buffers

    def steps(self) -> Iterator[list[Action | Pair]]:
        """Yield one action, or pair of passes, after the other."""
        yield from ([each] for each in self.actions)

    def num_pipe_buffers(self) -> int:
        """Return the number of DeepSpeed's buffers."""
        return self._buffers


class PlanInterpreter:
    """The loop of a pipeline engine.

    Attributes:
        recorder: Where this rank's time goes.
    """

    recorder: Recorder
    grid: Any
    global_rank: int
    global_steps: int
    stage_id: int
    fwd_outputs: list[Any]
    _reserve_pipe_buffers: Callable[[int], None]
    _INSTRUCTION_MAP: Mapping[type, Callable[..., None]]

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs = []
        steps = [each for step in pipe_schedule.steps() for each in step]
        PROGRESS.actions = steps
        for position, each in enumerate(steps):
            PROGRESS.position = position
            PROGRESS.at(each, self._peer(each))
            if isinstance(each, schedule.PipeInstruction):
                self._INSTRUCTION_MAP[type(each)](self, **each.kwargs)
            else:
                self._run(each)

    def _run(self, action: Action | Pair) -> None:
        name = "pair" if isinstance(action, Pair) else action.kind.name.lower()
        try:
            with self.recorder.action(action):
                getattr(self, f"_exec_{name}")(action)
        except Exception as error:
            error.add_note(
                f"rank {self.global_rank}, stage {self.stage_id}, optimizer step "
                f"{self.global_steps + 1}: in action {action} of the plan"
            )
            raise

    def _peer(self, action: object) -> int | None:
        """Return the global rank of a message's other side; None if it is no message."""
        if not isinstance(action, Action) or action.kind not in _NEIGHBOURS:
            return None
        stage = action.stage + _NEIGHBOURS[action.kind]
        return int(self.grid.stage_to_global(stage_id=stage))
