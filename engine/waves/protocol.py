# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's calls around forward and backward passes, for passes of segments."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from wavemare.engine.context import EngineContext
from wavemare.engine.seams import discard_open_step
from wavemare.engine.waves.executor import Hooks


class AccumulationProtocol:
    """Shows DeepSpeed plain gradient accumulation: backward passes never overlap.

    Args:
        engine: Of DeepSpeed's.
        steps: Whether the engine's ``step`` follows each micro-batch, as in a data-parallel engine;
            in a pipeline it follows the plan.
    """

    def __init__(self, engine: EngineContext, *, steps: bool = True) -> None:
        self._engine = engine
        self._steps = steps
        self._within = False

    def hooks(self) -> Hooks:
        """Return the executor's hooks."""
        return Hooks(
            forward=self.forward,
            begin_backward=self._begin_backward,
            scale=self._scale,
            end_backward=self._end_backward,
        )

    def begin_step(self) -> None:
        """Do what DeepSpeed does before a call of the whole model."""
        engine = self._engine
        if engine.zero_optimization_partition_weights():
            # ZeRO 3 prefetches in the order of the previous step.
            engine.optimizer.parameter_offload.get_param_coordinator().reset_step()
        if engine.training_dataloader is None:
            engine.tput_timer.start()

    def forward(self, micro_batch: int = 0) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        context: AbstractContextManager[Any] = autocast_if_enabled(self._engine)
        return context

    def discard_step(self) -> None:
        """Drop the gradients of a step that an error has ended."""
        self._leave()
        discard_open_step(self._engine)

    def _begin_backward(self, micro_batch: int) -> None:
        engine = self._engine
        if isinstance(engine.optimizer, ZeROOptimizer):
            engine.optimizer.clear_backward_seen_flag()
        # As within engine.backward: DeepSpeed's hooks leave the end of the backward pass to us.
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count += 1
            engine._running_engine_backward = True
        engine._unmanaged_backward_count += 1  # read if the configuration says so
        self._within = True
        engine._backward_prologue()

    def _scale(self, loss: Tensor) -> Tensor:
        engine = self._engine
        loss = engine.before_backward(loss) / engine.gradient_accumulation_steps()
        if isinstance(engine.optimizer, ZeROOptimizer):
            loss = engine.optimizer.scale_if_loss(loss)
        elif engine.torch_autocast_z0_gradscaler:
            loss = engine.torch_autocast_z0_gradscaler.scale(loss)
        return loss

    def _end_backward(self, micro_batch: int) -> None:
        self._engine._backward_epilogue()
        self._leave()
        if self._steps:
            last = micro_batch + 1 == self._engine.gradient_accumulation_steps()
            self._engine.end_micro_batch(last=last)

    def _leave(self) -> None:
        if not self._within:
            return
        self._within = False
        engine = self._engine
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count -= 1
            engine._running_engine_backward = engine._running_engine_backward_count > 0
