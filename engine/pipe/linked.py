# SPDX-License-Identifier: Apache-2.0
"""Pipeline engines with messages of their own: received ahead, sent without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.runtime.pipe.schedule import PipeSchedule
from torch import Tensor

from wavemare.engine.context import StageContext
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.pipe.engine import Handlers, PipelineEngine, StepSchedule
from wavemare.engine.pipe.micro_batch import MicroBatch, as_tuple
from wavemare.engine.pipe.p2p import PeerLink
from wavemare.engine.waves.passes import Pass, PassRunner
from wavemare.engine.waves.wavelet import AccumulationProtocol
from wavemare.errors import CommError, ConfigError, ModelError
from wavemare.pipeline.plan.lowering import Pair
from wavemare.pipeline.plan.plan import Action, Kind
from wavemare.pipeline.plan.run_plan import RunPlan
from wavemare.pipeline.plan.schedules import OVERLAP_SLACK, SEND_SLOTS

_OVERLAP = "wavemare.pipeline.overlap_forward_backward"


class StagePasses:
    """Runs the passes of one stage of a split model.

    In a pair, the all-reduces of one pass overlap the computation of the other.

    Args:
        engine: A pipeline engine.
        forward: Does a micro-batch's forward pass, given what calls the module.
        context: Of each forward pass; gets the micro-batch's number.

    Raises:
        ConfigError: The configuration asks for activation checkpoints.
    """

    def __init__(
        self,
        engine: StageContext,
        forward: Callable[[MicroBatch, Callable[..., Any]], None],
        context: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext(),
    ) -> None:
        if engine.module.activation_checkpoint_interval > 0:
            raise ConfigError(
                _OVERLAP,
                True,
                "pairs of passes are not tested with DeepSpeed's activation checkpoints",
                "Leave it out, or set activation_checkpoint_interval to 0",
            )
        self._do_forward = forward
        self._context = context
        self._protocol = AccumulationProtocol(engine)
        self._runner = PassRunner(engine.device)

    def forward(self, number: int, micro_batch: MicroBatch) -> None:
        """Do a forward pass; the micro-batch gets its outputs or its loss."""
        self._run(self._runner.alone, self._forward(number, micro_batch))

    def backward(self, number: int, micro_batch: MicroBatch) -> None:
        """Do a backward pass; the micro-batch's inputs get their gradients."""
        self._run(self._runner.alone, self._backward(number, micro_batch))

    def pair(
        self, number: int, micro_batch: MicroBatch, next_number: int, next_micro_batch: MicroBatch
    ) -> None:
        """Do the backward pass of one micro-batch together with the forward pass of another."""
        backward = self._backward(number, micro_batch)
        self._run(self._runner.pair, backward, self._forward(next_number, next_micro_batch))

    def _run(self, run: Callable[..., Any], *passes: Pass) -> None:
        try:
            run(*passes)
        except BaseException:
            self._protocol.discard_step()
            raise

    def _forward(self, number: int, micro_batch: MicroBatch) -> Pass:
        def forward() -> None:
            with self._context(number):
                self._do_forward(micro_batch, self._protocol.forward)

        return Pass(Kind.FORWARD, number, forward)

    def _backward(self, number: int, micro_batch: MicroBatch) -> Pass:
        if micro_batch.loss is None:
            backward = partial(self._protocol.accumulate, micro_batch.backward)
        else:
            backward = partial(self._protocol.backward, micro_batch.loss)
        return Pass(Kind.BACKWARD, number, backward)


def check_overlap(model: Any) -> None:
    """Check that a model is one whose stages sum over ranks.

    Raises:
        ConfigError: It is not a pipeline of a split model.
    """
    grid = model.mpu() if hasattr(model, "mpu") else None
    if grid is None or grid.get_slice_parallel_world_size() == 1:
        raise ConfigError(
            _OVERLAP,
            True,
            "there are no sums over ranks that could run behind other passes: "
            f"{type(model).__name__} is no pipeline whose stages are split",
            'Leave it out, or set "tensor_parallel": {"size": 2} and 2 or more stages',
        )


class LinkedEngine(PipelineEngine):
    """A pipeline engine that holds `MicroBatch` objects, not DeepSpeed's buffers.

    A subclass makes ``_link`` and ``_passes``, loads micro-batches, exchanges gradients and has a
    ``_forward_context`` for each forward pass. What a message's header holds is up to it.
    """

    _link: PeerLink
    _passes: StagePasses | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By stage and number.
        self._micro_batches: dict[tuple[int, int], MicroBatch] = {}

    def _handlers(self) -> Handlers:
        return {
            **super()._handlers(),
            Kind.LOAD: self._do_load,
            Kind.RECV_ACTIVATION: self._do_recv_activation,
            Kind.SEND_ACTIVATION: self._do_send_activation,
            Kind.RECV_GRAD: self._do_recv_grad,
            Kind.SEND_GRAD: self._do_send_grad,
        }

    def _first_inputs(self, inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """Return the first layer's inputs as leaves."""
        tensors = as_tuple(inputs)
        if self._reentrant_activation_checkpointing():
            tensors = tuple(t.clone().requires_grad_(t.is_floating_point()) for t in tensors)
        return tensors[0] if isinstance(inputs, Tensor) else tensors

    def _do_recv_activation(self, action: Action) -> None:
        _, inputs = self._link.receive_activation(action)
        self._micro_batches[action.place] = MicroBatch(inputs=inputs)

    def _do_forward(self, action: Action) -> None:
        number, micro_batch = action.micro_batch, self._micro_batches[action.place]
        if micro_batch.ended:
            pass
        elif self._passes is not None:
            self._passes.forward(number, micro_batch)
        else:
            with self._forward_context(number):
                self._forward(micro_batch)
            if self._stage_watch is not None and torch.is_grad_enabled():
                outputs = micro_batch.loss if self.is_last_stage() else micro_batch.outputs
                self._stage_watch.end_forward(
                    number, micro_batch.inputs, outputs, micro_batch.labels
                )
        self._end_forward(action, micro_batch)

    def _forward(self, micro_batch: MicroBatch, call: Callable[..., Any] | None = None) -> None:
        call = call or partial(deepspeed.DeepSpeedEngine.forward, self)
        inputs = micro_batch.inputs
        # Cloned because a layer may change its input in place, and leaves must not change.
        clones = tuple(tensor.clone() for tensor in as_tuple(inputs))
        outputs = call(clones[0] if isinstance(inputs, Tensor) else clones)
        if self.is_last_stage():
            loss_fn = self.module.loss_fn if self._compute_loss or torch.is_grad_enabled() else None
            if self.eval_return_logits:
                self.outputs = outputs
            micro_batch.loss = outputs if loss_fn is None else loss_fn(outputs, micro_batch.labels)
            if torch.is_grad_enabled() and not isinstance(micro_batch.loss, Tensor):
                reason, remedy = "training takes the gradient of one tensor", "Return it alone"
                raise ModelError("loss_fn", type(micro_batch.loss).__name__, reason, remedy)
            if self.module.get_additional_losses() is not None:
                raise ModelError(
                    "get_additional_losses",
                    type(self.module).__name__,
                    f"the schedule {self.settings.pipeline.schedule} carries one loss",
                    "Add them up in the loss function, or use schedule 1f1b",
                )
        else:
            micro_batch.outputs = outputs

    def _end_forward(self, action: Action, micro_batch: MicroBatch) -> None:
        if not self.is_last_stage():
            self._expect_grad(action, micro_batch)

    def _expect_grad(self, action: Action, micro_batch: MicroBatch) -> None:
        self._link.expect_grad(action, micro_batch.differentiable_outputs)

    def _do_send_activation(self, action: Action) -> None:
        self._link.send_activation(action, self._micro_batches[action.place].outputs)

    def _do_backward(self, action: Action) -> None:
        number, micro_batch = action.micro_batch, self._micro_batches[action.place]
        if micro_batch.ended:
            pass
        elif self._passes is not None:
            self._passes.backward(number, micro_batch)
        elif self.is_last_stage():
            deepspeed.DeepSpeedEngine.backward(self, self.before_backward(micro_batch.loss))
        else:
            self._accumulate(micro_batch.backward)
        if self._stage_watch is not None and not micro_batch.ended:
            self._stage_watch.end_backward(number, micro_batch.grads)
        self._end_backward(action, micro_batch)

    def _accumulate(self, backward: Callable[[], None]) -> None:
        """Run a backward pass that does not begin at a loss, as DeepSpeed's own pipeline."""
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        self._running_engine_backward = True
        try:
            backward()
        finally:
            self._running_engine_backward = False
        if self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)
        names = (*self.engine_timers.backward_inner_timers, *self.engine_timers.backward_timers)
        self._stop_timers([name for name in names if self.timers(name).started_])

    def _end_backward(self, action: Action, micro_batch: MicroBatch) -> None:
        micro_batch.free_graph()
        if self.is_first_stage():
            del self._micro_batches[action.place]

    def _do_pair(self, pair: Pair) -> None:
        micro_batch, next_one = (self._micro_batches[action.place] for action in pair)
        if micro_batch.ended or next_one.ended:
            self._do_backward(pair.backward)
            self._do_forward(pair.forward)
            return
        assert self._passes is not None
        number, following = (action.micro_batch for action in pair)
        self._passes.pair(number, micro_batch, following, next_one)
        self._end_backward(pair.backward, micro_batch)
        self._end_forward(pair.forward, next_one)

    def reset_activation_shape(self) -> None:
        """Forget the shapes of earlier micro-batches; all stages must call it."""
        super().reset_activation_shape()
        self._link.reset_shapes()

    def destroy(self) -> None:
        """Release the engine's resources, as `PipelineEngine.destroy`."""
        if hasattr(self, "_micro_batches"):  # DeepSpeed's destructor calls this, too
            # Graphs of forward passes that are ahead would keep the engine alive.
            self._micro_batches.clear()
        super().destroy()


class FlushingEngine(LinkedEngine):
    """Runs steps that empty the pipeline. Its messages do not block.

    A subclass says what a step's actions are.
    """

    _losses: Tensor | None = None
    _passes: StagePasses | None = None
    _is_under_way = False
    """Whether a step has failed after it began, and before it came to the optimizer."""

    def _begin(
        self, schedule: StepSchedule, receives: Iterable[Action], slots: int
    ) -> StepSchedule:
        """Start a schedule; see `PeerLink.begin`."""
        self._micro_batches.clear()
        self._losses = None
        receives = list(receives)
        kinds = Kind.SEND_GRAD, Kind.RECV_GRAD
        # By the last gradient that a stage sends, all losses are known.
        self._carriers = {
            (each.kind, each.stage): each.micro_batch
            for each in (*schedule.actions, *receives)  # of receives, the sender's order
            if isinstance(each, Action) and each.kind in kinds
        }
        if not self._is_under_way:  # else `_exec_schedule` refuses
            self._link.begin(receives, slots)
        return schedule

    def _carries(self, kind: Kind, place: tuple[int, int]) -> bool:
        """Return whether a gradient carries the losses, for which no rank has to wait then."""
        return self._carriers.get((kind, place[0])) == place[1]

    def _exec_schedule(self, pipe_schedule: PipeSchedule) -> None:
        try:
            if self._is_under_way:
                raise CommError(
                    "optimizer step",
                    self.global_steps + 1,
                    "it has failed on this rank, half-way, and other stages wait for its messages",
                    "Start all processes again, and resume from the last checkpoint",
                )
            super()._exec_schedule(pipe_schedule)
            self._link.flush()  # nothing is pending between two steps
        except BaseException:
            self.timers(TRAIN_BATCH_TIMER).reset()  # else it could not be started again
            self._is_under_way |= _is_half_way(PROGRESS.actions[: PROGRESS.position + 1])
            raise

    def _do_load(self, action: Action) -> None:
        batch = self._next_batch()
        if self.is_first_stage():
            self._micro_batches[action.place] = MicroBatch(inputs=self._first_inputs(batch[0]))
        if self.is_last_stage():
            self._micro_batches[action.place].labels = batch[1]

    def _forward_context(self, number: int) -> AbstractContextManager[None]:
        if self._stage_watch is not None and torch.is_grad_enabled():
            self._stage_watch.begin(number)
        return nullcontext()

    def _end_forward(self, action: Action, micro_batch: MicroBatch) -> None:
        super()._end_forward(action, micro_batch)
        if self.is_last_stage():
            self._add_loss(micro_batch.loss)

    def _do_send_grad(self, action: Action) -> None:
        grads = self._micro_batches.pop(action.place).input_grads()
        if self._carries(action.kind, action.place):
            grads.append(self._mean_losses())
        self._link.send_grad(action, grads)

    def _do_recv_grad(self, action: Action) -> None:
        _, grads = self._link.receive_grad(action)
        if self._carries(action.kind, action.place):
            self._losses = grads.pop()
        self._micro_batches[action.place].grads = grads

    def _expect_grad(self, action: Action, micro_batch: MicroBatch) -> None:
        outputs = micro_batch.differentiable_outputs
        if self._carries(Kind.RECV_GRAD, action.place):
            outputs.append(torch.empty(2))
        self._link.expect_grad(action, outputs)

    def _mean_losses(self) -> Tensor:
        """Return the mean loss of this pipeline's micro-batches, and that of all replicas'."""
        if self._losses is None:  # the last stage is here, and all its losses are known
            loss = self._scale_loss_by_gas(self.total_loss).reshape(())
            mean = loss.clone()
            if self.is_data_parallel:
                dist.all_reduce(mean, group=self.grid.get_data_parallel_group())
                mean /= self.dp_world_size
            self._losses = torch.stack([loss, mean]).float()
        return self._losses

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean loss as DeepSpeed's method of that name, without its broadcast."""
        self.dp_group_loss, mean = self._mean_losses().clone()
        return mean

    def _add_loss(self, loss: Tensor) -> None:
        self.loss = loss
        added = loss.detach()
        self.total_loss = added.clone() if self.total_loss is None else self.total_loss + added


def _is_half_way(begun: Sequence[object]) -> bool:
    """Return whether others wait for what follows these actions, of which the last has failed."""
    # Data may end, and others be given, while the step's first micro-batch is read. At the
    # optimizer step all messages are there, and all stages step or fail alike.
    kinds = [None if isinstance(each, Pair) else getattr(each, "kind", Kind.LOAD) for each in begun]
    return any(kind is not Kind.LOAD for kind in kinds) and kinds[-1] is not Kind.STEP


class OverlappedPipelineEngine(FlushingEngine):
    """1F1B of a split model, in which sums over ranks run behind other passes.

    It trains to the same bits as `PipelineEngine`. Messages must not block: with blocking sends the
    ranks would wait for each other in a circle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes = StagePasses(self, self._forward)
        self._link = PeerLink(
            self.grid, self.device, range(self.num_stages), dynamic=self.dynamic_shape
        )

    def _train_schedule(self) -> StepSchedule:
        run = RunPlan.of(self.settings.pipeline, self.num_stages, self.micro_batches, clips=False)
        actions = run.step(self.stage_id, 0, 1)
        self.tput_timer.start()
        return self._begin(StepSchedule(actions, overlap=True), actions, SEND_SLOTS + OVERLAP_SLACK)
