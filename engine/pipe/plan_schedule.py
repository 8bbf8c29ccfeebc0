# SPDX-License-Identifier: Apache-2.0
"""Our 1F1B plan in the instructions of DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule

from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.order import ahead
from wavemare.pipeline.plan.run_plan import RunPlan

__all__ = ["PlanSchedule"]

_BUFFER_INSTRUCTIONS = {
    Kind.LOAD: schedule.LoadMicroBatch,
    Kind.FORWARD: schedule.ForwardPass,
    Kind.BACKWARD: schedule.BackwardPass,
    Kind.SEND_ACTIVATION: schedule.SendActivation,
    Kind.RECV_ACTIVATION: schedule.RecvActivation,
    Kind.SEND_GRAD: schedule.SendGrad,
    Kind.RECV_GRAD: schedule.RecvGrad,
}


class PlanSchedule(schedule.PipeSchedule):
    """One optimizer step of one stage, as a DeepSpeed schedule."""

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """Yield the instructions, each as a step of its own."""
        for action in RunPlan(self.stages, self.micro_batches).step(self.stage_id, 0, 1):
            yield self._instructions(action)

    def _instructions(self, action: Action) -> list[schedule.PipeInstruction]:
        if action.kind is Kind.REDUCE:
            found = [schedule.ReduceTiedGrads(), schedule.ReduceGrads()]
        elif action.kind is Kind.STEP:
            found = [schedule.OptimizerStep()]
        else:
            buffer = action.micro_batch % self.num_pipe_buffers()
            found = [_BUFFER_INSTRUCTIONS[action.kind](buffer_id=buffer)]
        for instruction in found:
            instruction.action = action  # for those who follow the plan; its method gets none
        return found

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches are under way at most; DeepSpeed wants at least 2."""
        return max(2, min(ahead(self.stage_id, self.stages) + 1, self.micro_batches))
