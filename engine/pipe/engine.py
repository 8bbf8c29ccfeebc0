# SPDX-License-Identifier: Apache-2.0
"""The pipeline engines: DeepSpeed's, fed with Hugging Face batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule

from wavemare.engine.base import EngineMixin
from wavemare.engine.health.stage_numbers import StageWatch
from wavemare.engine.observe.progress import PROGRESS, Followed
from wavemare.engine.pipe.micro_batch import as_tuple
from wavemare.engine.pipe.plan_schedule import PlanSchedule
from wavemare.errors import ModelError
from wavemare.pipeline.plan.action import RECEIVES, SENDS

__all__ = ["DualPipeVEngine", "PipelineEngine"]


Shapes = tuple[tuple[int, ...], ...]

_NEIGHBOURS = {kind: distance for kind, (_, distance) in (SENDS | RECEIVES).items()}


class _Batches:
    """Accepts Hugging Face batches, and evaluations of another shape; tells the watchdog."""

    _shapes: Shapes | None = None

    def _next_batch(self) -> Any:
        batch = super()._next_batch()  # type: ignore[misc]
        if isinstance(batch, Mapping):
            batch = self.module.split_batch(batch)  # type: ignore[attr-defined]
        if batch is not None and not self.dynamic_shape:  # type: ignore[attr-defined]
            self._check_shapes(batch[0])
        return batch

    def _check_shapes(self, inputs: Any) -> None:
        # DeepSpeed tells the next stage a shape only once, and cuts or hangs on another one.
        tensors = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
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
        """Forget the shapes of the micro-batches so far; all stages must call it."""
        super().reset_activation_shape()  # type: ignore[misc]
        self._shapes = None

    def destroy(self) -> None:
        """Give back what the engine holds; all ranks should call it."""
        # Graphs of the last step, whose hooks would keep the engine alive.
        self.loss: torch.Tensor | None = None
        self.total_loss: torch.Tensor | None = None
        self.pipe_buffers: dict[str, Any] = {}
        super().destroy()  # type: ignore[misc]

    def train_batch(self, data_iter: Any = None) -> Any:
        """Train an optimizer step as ``deepspeed.PipelineEngine.train_batch``."""
        with self.training_step():  # type: ignore[attr-defined]
            return super().train_batch(data_iter)  # type: ignore[misc]

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        grid = self.grid  # type: ignore[attr-defined]
        super()._exec_schedule(Followed(pipe_schedule, PROGRESS, grid, _NEIGHBOURS))  # type: ignore[misc]

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ``deepspeed.PipelineEngine.eval_batch``.

        The micro-batches of one call have one shape, which need not be the training's (with
        ``dynamic_shape`` each may have its own).
        """
        self.reset_activation_shape()
        try:
            with PROGRESS.doing("evaluation"):
                return super().eval_batch(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.reset_activation_shape()


class PipelineEngine(EngineMixin, _Batches, deepspeed.PipelineEngine):
    """``deepspeed.PipelineEngine`` (1F1B).

    ``train_batch`` returns, on every rank, the mean loss over micro-batches and data ranks.
    """

    loss: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self.module, "sends_whole", False):
            self.is_pipe_partitioned = self.is_grad_partitioned = False
        self._stage_watch = self._make_stage_watch()

    def _make_stage_watch(self) -> StageWatch | None:
        # Passes in pairs go by segments, and tell nobody what goes in and comes out.
        pairs = self._sections is not None and self._sections.pipeline.pair_passes
        return None if self._guard is None or pairs else StageWatch(self, self._guard)

    def _train_schedule(self) -> PlanSchedule:
        return PlanSchedule(self.micro_batches, self.num_stages, self.stage_id)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        watch = self._stage_watch if torch.is_grad_enabled() and self.module.training else None
        if watch is not None:
            watch.begin(buffer_id)
        super()._exec_forward_pass(buffer_id)
        if watch is not None:
            buffers = self.pipe_buffers
            outputs = self.loss if self.is_last_stage() else buffers["outputs"][buffer_id]
            inputs, labels = buffers["inputs"][buffer_id], buffers["labels"][buffer_id]
            watch.end_forward(buffer_id, inputs, outputs, labels)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage() and isinstance(self.loss, torch.Tensor):
            self.loss = self.watched(self.loss)
        super()._exec_backward_pass(buffer_id)
        if self._stage_watch is not None:
            last = self.is_last_stage()
            self._stage_watch.end_backward(buffer_id, () if last else as_tuple(self.grad_layer))

    _INSTRUCTION_MAP: ClassVar = {
        **deepspeed.PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
    }


class DualPipeVEngine(EngineMixin, _Batches, deepspeed.DualPipeVEngine):
    """``deepspeed.DualPipeVEngine``, chosen by a ``DualPipeVModule``."""
