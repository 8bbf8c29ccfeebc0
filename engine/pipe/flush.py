# SPDX-License-Identifier: Apache-2.0
"""The update of a synchronous schedule: the pipeline is empty at each optimizer step.

Losses, gradients and weights equal those of ``deepspeed.PipelineEngine`` bit for bit where a weight
is used once. No rank waits for the loss: the last gradient that a stage sends carries it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from wavemare.engine.pipe.micro_batch import MicroBatch
from wavemare.engine.pipe.update import Update
from wavemare.errors import DataError
from wavemare.pipeline.plan.plan import Action, Kind, RankPlan

if TYPE_CHECKING:
    from wavemare.engine.pipe.engine import PipelineEngine


def short_data(read: int) -> DataError:
    """Return the error of data that ends within a step, after so many micro-batches."""
    reason = "the data ended within a step, after so many of its micro-batches"
    remedy = "Give whole steps: drop the last short one, or use deepspeed.utils.RepeatingLoader"
    return DataError("data_iter", read, reason, remedy)


class Flush(Update):
    """Reduces, clips and steps at the end of each step, and adds up its losses.

    Args:
        engine: Its DeepSpeed part is built; its messages are not yet.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine)
        self._plan: RankPlan | None = None
        self._losses: Tensor | None = None
        self._sums: list[Tensor] = []  # of the loss, and of the additional ones

    def train(self) -> None:
        """Run a step of the plan.

        Raises:
            DataEndedError: The data had ended before the step; on all ranks.
        """
        engine = self._engine
        self._plan = plan = engine.plan.of_rank(engine.stage_id)
        self._losses, self._sums = None, []
        engine.begin_messages(plan.receives, plan.send_slots)
        engine.run_actions(plan.actions, split=plan.is_split)
        engine.link.flush()  # nothing is pending between two steps
        engine.total_loss = self._sums[0] if self._sums else None

    def next_batch(self, action: Action) -> Any:
        """Return the batch of a micro-batch; None if the data has ended before the step.

        Raises:
            DataError: The data has ended within the step.
        """
        engine = self._engine
        try:
            return engine.feed.next()
        except StopIteration:
            if not action.micro_batch:
                return None
            raise short_data(action.micro_batch) from None

    def note_forward(self, action: Action, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """See the result of a forward pass."""
        if not is_last:
            return
        engine = self._engine
        others = (engine.module.get_additional_losses() or {}).values()
        losses = [loss.detach() for loss in (micro_batch.loss, *others)]
        known = self._sums or [torch.zeros_like(loss) for loss in losses]
        self._sums = [total + loss for total, loss in zip(known, losses, strict=True)]
        if engine.guard is not None:
            engine.guard.note_loss(action.micro_batch + 1, micro_batch.loss, micro_batch.labels)

    def activation_header(self, action: Action, micro_batch: MicroBatch) -> list[Any]:
        """Return the numbers that go with an activation."""
        return [] if action.micro_batch else [float(micro_batch.ended), *micro_batch.marks]

    def read_activation_header(self, action: Action, header: list[float]) -> bool:
        """Take these numbers; return whether the data has ended."""
        return bool(header and header[0])

    def grads_to_send(self, action: Action, grads: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Return the header and the tensors of a message of gradients."""
        return [], [*grads, self._mean_losses()] if self._carries(action) else grads

    def grads_received(self, action: Action, _: list[float], grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients of a message."""
        if self._carries(action):
            *grads, self._losses = grads
        return grads

    def grads_expected(self, action: Action, outputs: list[Tensor]) -> list[Tensor]:
        """Return tensors of the shapes and types that the message of gradients will have."""
        receive = action._replace(kind=Kind.RECV_GRAD)
        if self._carries(receive):
            count = 2 + len(self._engine.module.get_additional_losses() or ())
            return [*outputs, torch.empty(count, dtype=torch.float32)]
        return outputs

    def _carries(self, action: Action) -> bool:
        """Return whether a gradient carries the losses, for which no rank has to wait then."""
        return self._plan is not None and action[:3] in self._plan.carriers

    def reduce(self, action: Action) -> None:
        """Average the gradients over the ranks that have the same weights."""
        self._engine._exec_reduce_tied_grads()
        self._engine._exec_reduce_grads()

    def step(self, action: Action) -> None:
        """Step the optimizer, after clipping by the norm of all stages."""
        self._engine._exec_optimizer_step()

    def mean_loss(self) -> Tensor:
        """Return the step's mean loss over micro-batches and data ranks: scalar, fp32."""
        engine = self._engine
        engine.dp_group_loss, mean, *others = self._mean_losses().clone()
        names = list(engine.module.get_additional_losses() or ())
        engine.agg_additional_losses = dict(zip(names, others, strict=True)) if names else None
        return mean

    def _mean_losses(self) -> Tensor:
        """Return the mean loss of this pipeline's micro-batches, that of all replicas' and others.

        The additional losses of a module follow, which are means over all replicas.
        """
        if self._losses is None:  # the last stage is here, and all its losses are known
            engine = self._engine
            means = [engine._scale_loss_by_gas(total) for total in self._sums]
            mean = torch.stack([each.reshape(()) for each in means])
            loss = mean[:1].clone()
            if engine.is_data_parallel:
                dist.all_reduce(mean, group=engine.grid.get_data_parallel_group())
                mean /= engine.dp_world_size
            self._losses = torch.cat([loss, mean]).float()
        return self._losses
