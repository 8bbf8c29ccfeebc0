# SPDX-License-Identifier: Apache-2.0
"""The pipeline engines: DeepSpeed's, fed with Hugging Face batches, and the interpreter of plans.

`PlanInterpreter` runs a stage's part of a checked plan, action by action, and notes each one. An
engine says which of its methods does which kind of action. DeepSpeed's own schedules, of
evaluations and DualPipeV, run here too, by DeepSpeed's instruction map.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule

from wavemare.engine.base import EngineMixin
from wavemare.engine.experts import ExpertsMixin
from wavemare.engine.health.stage_numbers import StageWatch
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.observe.recorder import Recorder
from wavemare.engine.pipe.micro_batch import as_tuple, to_device
from wavemare.engine.pipe.stage_optimizer import LayerwiseNorm
from wavemare.errors import ConfigError, ModelError
from wavemare.pipeline.plan.lowering import Pair, ahead, in_pairs
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action, Kind
from wavemare.pipeline.plan.run_plan import RunPlan

_NEIGHBOURS = {kind: distance for kind, (_, distance) in (SENDS | RECEIVES).items()}

Handlers = dict[Kind, Callable[[Action], None]]
"""What does each kind of action."""


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


class PlanInterpreter(deepspeed.PipelineEngine):
    """The loop of a pipeline engine; it accepts Hugging Face batches, and evaluations of any shape.

    Attributes:
        recorder: Where this rank's time goes.
    """

    recorder: Recorder
    _shapes: tuple[tuple[int, ...], ...] | None = None

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs: list[Any] = []
        steps = [each for step in pipe_schedule.steps() for each in step]
        handlers = self._handlers()
        PROGRESS.actions = steps
        for position, each in enumerate(steps):
            PROGRESS.position = position
            PROGRESS.at(each, self._peer(each))
            if isinstance(each, schedule.PipeInstruction):
                self._INSTRUCTION_MAP[type(each)](self, **each.kwargs)
            else:
                self._run(each, handlers)

    def _handlers(self) -> Handlers:
        """Return what does each kind of action in this engine's plans."""
        return {}

    def _do_pair(self, pair: Pair) -> None:
        """Run a backward and a forward pass together."""
        raise NotImplementedError

    def _run(self, action: Action | Pair, handlers: Handlers) -> None:
        start = time.perf_counter()
        try:
            if isinstance(action, Pair):
                self._do_pair(action)
            else:
                handlers[action.kind](action)
        except Exception as error:
            error.add_note(
                f"rank {self.global_rank}, stage {self.stage_id}, optimizer step "
                f"{self.global_steps + 1}: in action {action} of the plan"
            )
            raise
        self.recorder.add(action, start, time.perf_counter())

    def __setattr__(self, name: str, value: object) -> None:
        # torch's own asks first whether it is a parameter, a module or a buffer: 10 times as long.
        if type(value) in (bool, int):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _peer(self, action: object) -> int | None:
        """Return the global rank of a message's other side; None if it is no message."""
        if not isinstance(action, Action) or action.kind not in _NEIGHBOURS:
            return None
        return self.grid.pp_group[self._home_of(action.stage + _NEIGHBOURS[action.kind])]

    def _home_of(self, stage: int) -> int:
        """Return a stage's rank in the pipeline."""
        return stage

    def _next_batch(self) -> Any:
        batch = super()._next_batch()
        if isinstance(batch, Mapping):
            batch = self.module.split_batch(batch)
        if batch is not None and not self.dynamic_shape:
            self._check_shapes(batch[0])
        # Here once: DeepSpeed's own copies let a GPU's host wait for the passes that are queued.
        return to_device(batch, self.device, detach=True)

    def _check_shapes(self, inputs: Any) -> None:
        # DeepSpeed sends the next stage a shape only once, and cuts or hangs on another one.
        shapes = tuple(tuple(tensor.shape) for tensor in as_tuple(inputs))
        if self._shapes is None:
            self._shapes = shapes
        elif self._shapes != shapes:
            raise ModelError(
                "batch",
                shapes,
                f"the micro-batches before had the shapes {self._shapes}, and the stages expect "
                "them again",
                'Pad to one length and drop the last short batch, or set "dynamic_shape": true in '
                "wavemare.pipeline (to_pipeline and PipelineModule have it as a parameter)",
            )

    def reset_activation_shape(self) -> None:
        """Forget the shapes of earlier micro-batches; all stages must call it."""
        super().reset_activation_shape()
        self._shapes = None

    def destroy(self) -> None:
        """Release the engine's resources; all ranks should call it."""
        # Graphs of the last step, whose hooks would keep the engine alive.
        self.loss: torch.Tensor | None = None
        self.total_loss: torch.Tensor | None = None
        self.pipe_buffers: dict[str, Any] = {}
        super().destroy()

    def _start_timers(self, timer_names: Sequence[str]) -> None:
        # DeepSpeed's pipeline starts those of a backward pass, and so do its hooks of outputs.
        super()._start_timers([name for name in timer_names if not self.timers(name).started_])

    def steps_per_print(self) -> int:
        """Return after how many steps to print, never without a number: DeepSpeed divides by it."""
        return super().steps_per_print() or 1 << 60

    def forward(self, *_: Any, **__: Any) -> None:
        """Refuse a single pass."""
        reason, remedy = "its engine trains whole steps", "Call engine.train_batch(iterator)"
        raise ConfigError("wavemare.pipeline.stages", self.num_stages, reason, remedy)

    def train_batch(self, data_iter: Any = None) -> Any:
        """Train an optimizer step as ``deepspeed.PipelineEngine.train_batch``."""
        with self.training_step():
            return super().train_batch(data_iter)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ``deepspeed.PipelineEngine.eval_batch``.

        The micro-batches of one call have one shape, which need not be the training's (with
        ``dynamic_shape`` each may have its own).
        """
        self.reset_activation_shape()
        try:
            with PROGRESS.doing("evaluation"):
                result = super().eval_batch(*args, **kwargs)
            if isinstance(result, tuple) and getattr(self.module, "sends_router_sums", False):
                loss, outputs = result
                result = loss, outputs and outputs[0]  # None but on the last stage
            return result
        finally:
            self.reset_activation_shape()


class PipelineEngine(ExpertsMixin, EngineMixin, PlanInterpreter):
    """``deepspeed.PipelineEngine`` (1F1B).

    ``train_batch`` returns, on every rank, the mean loss over micro-batches and data ranks.
    """

    grad_layer: Any
    _norm: LayerwiseNorm | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = Recorder()
        if getattr(self.module, "sends_whole", False):
            self.is_pipe_partitioned = self.is_grad_partitioned = False
        if self._expert_grid is not None:
            self._norm = LayerwiseNorm(self)
        # The watch knows one pass at a time.
        guard, overlap = self.guard, self.settings.pipeline.overlap_forward_backward
        self._stage_watch = None if guard is None or overlap else StageWatch(self, guard)

    def clip_fp32_gradients(self) -> None:
        """Clip as DeepSpeed's method of that name, or by a norm of our own."""
        if self._norm is None:
            super().clip_fp32_gradients()
        else:
            self._norm.clip(self.gradient_clipping())

    @property
    def loss_rank(self) -> int:
        """Global rank of the process of this pipeline that computes the loss."""
        return int(self.grid.stage_to_global(stage_id=self._home_of(self._last_stage)))

    @property
    def _last_stage(self) -> int:
        return self.num_stages - 1

    @property
    def active_stage(self) -> int:
        """The stage whose action runs; between actions one of this rank's."""
        return int(self.stage_id)

    def whole_passes(self, stage: int) -> AbstractContextManager[None]:
        """Return the context of a stage's passes that are not the plan's."""
        return nullcontext()

    def _train_schedule(self) -> StepSchedule:
        return _step_schedule(self.num_stages, self.micro_batches, self.stage_id, self._num_buffers)

    @property
    def _num_buffers(self) -> int:
        """Micro-batches in flight at most; DeepSpeed wants at least 2."""
        return max(2, min(ahead(self.stage_id, self.num_stages) + 1, self.micro_batches))

    def _handlers(self) -> Handlers:
        def on_buffer(execute: Callable[[int], None]) -> Callable[[Action], None]:
            return lambda action: execute(self._buffer(action))

        return {
            Kind.LOAD: on_buffer(self._exec_load_micro_batch),
            Kind.RECV_ACTIVATION: on_buffer(self._exec_recv_activations),
            Kind.FORWARD: self._do_forward,
            Kind.SEND_ACTIVATION: on_buffer(self._exec_send_activations),
            Kind.RECV_GRAD: on_buffer(self._exec_recv_grads),
            Kind.BACKWARD: self._do_backward,
            Kind.SEND_GRAD: on_buffer(self._exec_send_grads),
            Kind.REDUCE: self._do_reduce,
            Kind.STEP: self._do_step,
        }

    def _buffer(self, action: Action) -> int:
        return action.micro_batch % self._num_buffers

    def _do_forward(self, action: Action) -> None:
        buffer, watch = self._buffer(action), self._stage_watch
        if watch is not None:
            watch.begin(action.micro_batch)
        self._exec_forward_pass(buffer)
        if watch is not None:
            buffers = self.pipe_buffers
            outputs = self.loss if self.is_last_stage() else buffers["outputs"][buffer]
            inputs, labels = buffers["inputs"][buffer], buffers["labels"][buffer]
            watch.end_forward(action.micro_batch, inputs, outputs, labels)

    def _do_backward(self, action: Action) -> None:
        if self.is_last_stage() and isinstance(self.loss, torch.Tensor):
            self.loss = self.before_backward(self.loss)
        self._exec_backward_pass(self._buffer(action))
        if self._stage_watch is not None:
            grads = () if self.is_last_stage() else as_tuple(self.grad_layer)
            self._stage_watch.end_backward(action.micro_batch, grads)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        outputs, grads = self.pipe_buffers["outputs"], self.grad_layer
        if not self.is_last_stage() and getattr(self.module, "sends_router_sums", False):
            # DeepSpeed would run a backward pass for each of them.
            floating = [t for t in as_tuple(outputs[buffer_id]) if t.is_floating_point()]
            outputs[buffer_id] = _Joined.apply(grads, *floating)
            self.grad_layer = torch.ones_like(outputs[buffer_id])
        super()._exec_backward_pass(buffer_id)
        self.grad_layer = grads

    def _do_reduce(self, action: Action) -> None:
        self._exec_reduce_tied_grads()
        self._exec_reduce_grads()

    def _do_step(self, action: Action) -> None:
        self._exec_optimizer_step()


@lru_cache(maxsize=16)
def _step_schedule(num_stages: int, micro_batches: int, stage: int, buffers: int) -> StepSchedule:
    actions = RunPlan(num_stages, micro_batches).step(stage, 0, 1)
    return StepSchedule(actions, buffers=buffers)


class _Joined(torch.autograd.Function):
    """One scalar for several outputs, which in its backward pass get their gradients together."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.grads


class DualPipeVEngine(EngineMixin, PlanInterpreter, deepspeed.DualPipeVEngine):
    """``deepspeed.DualPipeVEngine``, chosen by a ``DualPipeVModule``."""
