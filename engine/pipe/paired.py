# SPDX-License-Identifier: Apache-2.0
"""1F1B with the backward and forward passes of its steady state in pairs.

Messages are those of the asynchronous engine: received ahead, sent without waiting. With blocking
sends the plan would have ranks wait for each other in a circle.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from wavemare.engine.pipe.channels import Channels
from wavemare.engine.pipe.engine import PipelineEngine
from wavemare.engine.pipe.exchange import Exchange
from wavemare.engine.pipe.micro_batch import MicroBatch, as_tuple, to_device
from wavemare.engine.pipe.stage_passes import StagePasses
from wavemare.engine.pipe.step_schedule import INSTRUCTIONS, Pair, Window
from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.run_plan import RunPlan
from wavemare.pipeline.plan.schedules import PAIR_SLACK, SEND_SLOTS

__all__ = ["PairedPipelineEngine"]


class PairedPipelineEngine(PipelineEngine):
    """A pipeline of a split model, in which sums over ranks run behind other passes.

    It is used as, and trains to the same bits as, `PipelineEngine`.
    """

    total_loss: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes = StagePasses(self)
        self._channels = Channels(self.grid, self.device, SEND_SLOTS + PAIR_SLACK)
        self._exchange = Exchange(
            self._channels,
            down_header=0,
            up_header=0,
            dynamic=self.dynamic_shape,
        )
        self._micro_batches: dict[int, MicroBatch] = {}

    def _train_schedule(self) -> Any:
        run = RunPlan(self.num_stages, self.micro_batches, pairs=True, slack=PAIR_SLACK)
        plan = run.step(self.stage_id, 0, 1)
        self._micro_batches.clear()
        self._exchange.begin(plan, 0)
        return Window(plan, pairs=True)

    def reset_activation_shape(self) -> None:
        """Forget the shapes of the micro-batches so far; all stages must call it."""
        super().reset_activation_shape()
        self._exchange.forget_shapes()

    def _exec_load(self, action: Action) -> None:
        batch = self._next_batch()
        if self.is_first_stage():
            inputs = tuple(tensor.detach().to(self.device) for tensor in as_tuple(batch[0]))
            self._micro_batches[action.micro_batch] = MicroBatch(inputs=inputs)
        if self.is_last_stage():
            self._micro_batches[action.micro_batch].labels = to_device(
                batch[1], self.device, detach=True
            )

    def _exec_recv_activation(self, action: Action) -> None:
        _, inputs = self._exchange.receive_activation(self.device)
        self._micro_batches[action.micro_batch] = MicroBatch(inputs=inputs)

    def _exec_forward(self, action: Action) -> None:
        self.tput_timer.start()
        self._passes.forward(action.micro_batch, self._micro_batches[action.micro_batch])
        self._end_forward(action.micro_batch)

    def _end_forward(self, number: int) -> None:
        micro_batch = self._micro_batches[number]
        if self.is_last_stage():
            self.loss = loss = micro_batch.loss
            self.total_loss = loss.clone() if self.total_loss is None else self.total_loss + loss
        else:
            self._exchange.expect_grad(number, micro_batch.differentiable_outputs)

    def _exec_send_activation(self, action: Action) -> None:
        self._exchange.send_activation([], self._micro_batches[action.micro_batch].outputs)

    def _exec_recv_grad(self, action: Action) -> None:
        number = action.micro_batch
        _, self._micro_batches[number].grads = self._exchange.receive_grad(number, self.device)

    def _exec_backward(self, action: Action) -> None:
        self._passes.backward(action.micro_batch, self._micro_batches[action.micro_batch])
        self._end_backward(action.micro_batch)

    def _end_backward(self, number: int) -> None:
        self._micro_batches[number].free_graph()
        if self.is_first_stage():
            del self._micro_batches[number]

    def _exec_pair(self, backward: Action, forward: Action) -> None:
        self.tput_timer.start()
        number, following = backward.micro_batch, forward.micro_batch
        held = self._micro_batches
        self._passes.pair(number, held[number], following, held[following])
        self._end_backward(number)
        self._end_forward(following)

    def _exec_send_grad(self, action: Action) -> None:
        grads = self._micro_batches.pop(action.micro_batch).input_grads()
        self._exchange.send_grad([], grads)

    def _exec_reduce(self, action: Action) -> None:
        self._exec_reduce_tied_grads()
        self._exec_reduce_grads()

    def _exec_step(self, action: Action) -> None:
        self._exec_optimizer_step()
        self._channels.flush()  # nothing is under way between two steps

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        INSTRUCTIONS[Kind.LOAD]: _exec_load,
        INSTRUCTIONS[Kind.RECV_ACTIVATION]: _exec_recv_activation,
        INSTRUCTIONS[Kind.FORWARD]: _exec_forward,
        INSTRUCTIONS[Kind.SEND_ACTIVATION]: _exec_send_activation,
        INSTRUCTIONS[Kind.RECV_GRAD]: _exec_recv_grad,
        INSTRUCTIONS[Kind.BACKWARD]: _exec_backward,
        INSTRUCTIONS[Kind.SEND_GRAD]: _exec_send_grad,
        INSTRUCTIONS[Kind.REDUCE]: _exec_reduce,
        INSTRUCTIONS[Kind.STEP]: _exec_step,
        Pair: _exec_pair,
    }
