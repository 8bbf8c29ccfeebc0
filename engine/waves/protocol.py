# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's calls around passes of which a backward and a forward one may take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from wavemare.engine.context import EngineContext
from wavemare.engine.seams import discard_open_step


class AccumulationProtocol:
    """Shows DeepSpeed plain gradient accumulation: backward passes never overlap.

    The engine's own ``forward`` would reset what ZeRO has counted of a backward pass under way.

    Args:
        engine: Of DeepSpeed's.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self._within = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        with autocast_if_enabled(self._engine):
            return self._engine.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch's loss."""
        engine = self._engine
        loss = engine.before_backward(loss) / engine.gradient_accumulation_steps()
        if isinstance(engine.optimizer, ZeROOptimizer):
            loss = engine.optimizer.scale_if_loss(loss)
        elif engine.torch_autocast_z0_gradscaler:
            loss = engine.torch_autocast_z0_gradscaler.scale(loss)
        self.accumulate(loss.backward)

    def accumulate(self, backward: Callable[[], None]) -> None:
        """Run a backward pass."""
        engine = self._engine
        if isinstance(engine.optimizer, ZeROOptimizer):
            engine.optimizer.clear_backward_seen_flag()
        # As within engine.backward: DeepSpeed's hooks leave the end of the backward pass to us.
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count += 1
            engine._running_engine_backward = True
        self._within = True
        engine._unmanaged_backward_count += 1  # read if the configuration says so
        engine._backward_prologue()
        backward()
        engine._backward_epilogue()
        self._leave()

    def discard_step(self) -> None:
        """Drop the gradients of a step that an error has ended."""
        self._leave()
        discard_open_step(self._engine)

    def _leave(self) -> None:
        if not self._within:
            return
        self._within = False
        engine = self._engine
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count -= 1
            engine._running_engine_backward = engine._running_engine_backward_count > 0
