"""1F1B with the backward and forward passes of its steady state in pairs.

Messages are those of the asynchronous engine: received ahead, sent without waiting. With blocking
sends the plan would have ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from wavemare.engine.channels import Channels
from wavemare.engine.exchange import Exchange
from wavemare.engine.micro_batch import MicroBatch, as_tuple, moved
from wavemare.engine.pipe import PipelineEngine
from wavemare.engine.stage_passes import StagePasses
from wavemare.pipeline.action import Action, Kind
from wavemare.pipeline.passes import paired
from wavemare.pipeline.schedules import PAIR_SLACK, SEND_SLOTS, paired_one_f_one_b_stage

__all__ = ["PairedPipelineEngine"]


class _Do(schedule.PipeInstruction):
    """An action of the plan, or the two of a pair, for DeepSpeed's interpreter."""


class _Step(schedule.PipeSchedule):
    """The actions of one optimizer step of one stage, as a DeepSpeed schedule."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """Yield one instruction after the other."""
        for actions in paired(self._actions):
            yield [_Do(actions=actions)]

    def num_pipe_buffers(self) -> int:
        """Return 0: micro-batches are held by their number, not in DeepSpeed's buffers."""
        return 0


class PairedPipelineEngine(PipelineEngine):
    """A pipeline of a split model, in which sums over ranks run behind other passes.

    It is used as, and trains to the same bits as, `PipelineEngine`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes = StagePasses(self)
        channels = Channels(self.grid, self.device, SEND_SLOTS + PAIR_SLACK)
        self._exchange = Exchange(channels, down_header=0, up_header=0, dynamic=self.dynamic_shape)
        self._micro_batches: dict[int, MicroBatch] = {}

    def _train_schedule(self) -> Any:
        plan = list(paired_one_f_one_b_stage(self.stage_id, self.num_stages, self.micro_batches))
        self._micro_batches.clear()
        self._exchange.begin(plan, 0)
        return _Step(plan)

    def reset_activation_shape(self) -> None:
        """Forget the shapes of the micro-batches so far; all stages must call it."""
        super().reset_activation_shape()
        if hasattr(self, "_exchange"):  # DeepSpeed's constructor may call this, too
            self._exchange.forget_shapes()

    def _exec_do(self, actions: tuple[Action, ...]) -> None:
        if len(actions) > 1:
            self._pair(*actions)
        else:
            self._ACTIONS[actions[0].kind](self, actions[0].micro_batch)

    def _load(self, number: int) -> None:
        batch = self._next_batch()
        if self.is_first_stage():
            inputs = tuple(tensor.detach().to(self.device) for tensor in as_tuple(batch[0]))
            self._micro_batches[number] = MicroBatch(inputs=inputs)
        if self.is_last_stage():
            self._micro_batches[number].labels = moved(batch[1], self.device)

    def _receive_activation(self, number: int) -> None:
        _, inputs = self._exchange.receive_activation(self.device)
        self._micro_batches[number] = MicroBatch(inputs=inputs)

    def _forward(self, number: int) -> None:
        self.tput_timer.start()
        self._passes.forward(number, self._micro_batches[number])
        self._end_forward(number)

    def _end_forward(self, number: int) -> None:
        micro_batch = self._micro_batches[number]
        if self.is_last_stage():
            self.loss = micro_batch.loss
            self.total_loss = self._added_to_total(micro_batch.loss)
        else:
            self._exchange.expect_grad(number, micro_batch.differentiable_outputs)

    def _added_to_total(self, loss: Tensor) -> Tensor:
        return torch.zeros_like(loss) + loss if self.total_loss is None else self.total_loss + loss

    def _send_activation(self, number: int) -> None:
        self._exchange.send_activation([], self._micro_batches[number].outputs)

    def _receive_grad(self, number: int) -> None:
        _, self._micro_batches[number].grads = self._exchange.receive_grad(number, self.device)

    def _backward(self, number: int) -> None:
        self._passes.backward(number, self._micro_batches[number])
        self._end_backward(number)

    def _end_backward(self, number: int) -> None:
        self._micro_batches[number].free_graph()
        if self.is_first_stage():
            del self._micro_batches[number]

    def _pair(self, backward: Action, forward: Action) -> None:
        self.tput_timer.start()
        number, next_number = backward.micro_batch, forward.micro_batch
        self._passes.pair(
            number, self._micro_batches[number], next_number, self._micro_batches[next_number]
        )
        self._end_backward(number)
        self._end_forward(next_number)

    def _send_grad(self, number: int) -> None:
        self._exchange.send_grad([], self._micro_batches.pop(number).input_grads())

    def _reduce(self, number: int) -> None:
        self._exec_reduce_tied_grads()
        self._exec_reduce_grads()

    def _step_optimizer(self, number: int) -> None:
        self._exec_optimizer_step()

    _ACTIONS: ClassVar = {
        Kind.LOAD: _load,
        Kind.RECV_ACTIVATION: _receive_activation,
        Kind.FORWARD: _forward,
        Kind.SEND_ACTIVATION: _send_activation,
        Kind.RECV_GRAD: _receive_grad,
        Kind.BACKWARD: _backward,
        Kind.SEND_GRAD: _send_grad,
        Kind.REDUCE: _reduce,
        Kind.STEP: _step_optimizer,
    }

    _INSTRUCTION_MAP: ClassVar = {**PipelineEngine._INSTRUCTION_MAP, _Do: _exec_do}
