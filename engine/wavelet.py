"""Waves inside a DeepSpeed engine: the plan's passes, with DeepSpeed's own reductions and steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from wavemare.engine.segments import Segments
from wavemare.engine.survey import Survey, survey
from wavemare.engine.wave_executor import Hooks, WaveExecutor
from wavemare.pipeline.wave import tick_tock_step
from wavemare.pipeline.wave_config import WaveletConfig

__all__ = ["Wavelet", "attach_wavelet"]

logger = logging.getLogger("wavemare")


class Wavelet:
    """Trains the micro-batches of an optimizer step as two waves.

    Around the passes it does what ``engine.forward``, ``engine.backward`` and ``engine.step`` do
    around theirs: since the backward passes of two micro-batches never overlap, DeepSpeed sees
    gradient accumulation.

    Args:
        engine: A data-parallel engine.
        segments: Its model.
        config: The section ``wavelet``.
    """

    def __init__(self, engine: Any, segments: Segments, config: WaveletConfig) -> None:
        self._engine = engine
        self._segments = segments
        self._config = config
        self._executor: WaveExecutor | None = None
        self._budget: int | None = None
        self._saved_bytes: tuple[int, ...] = ()

    def train(self, batches: Iterator[Any]) -> list[Tensor]:
        """Train one optimizer step.

        Args:
            batches: Micro-batches on the engine's device.

        Returns:
            The losses of its micro-batches, detached.
        """
        if self._executor is None:
            first = next(batches)
            self._prepare(first)
            batches = chain([first], batches)
        assert self._executor is not None
        if self._engine.zero_optimization_partition_weights():
            # As at each call of the whole model: what is gathered ahead is known from the last one.
            self._engine.optimizer.parameter_offload.get_param_coordinator().reset_step()
        try:
            return self._executor.run(self._actions(), batches)
        except BaseException:
            self._leave_backward()
            self._engine.zero_grad()
            raise

    def _prepare(self, batch: Any) -> None:
        with autocast_if_enabled(self._engine):
            found = survey(self._segments, self._engine.module, batch)
        # Ranks must follow one plan, whatever the shapes of their batches.
        agreed = torch.tensor(found.saved_bytes, device=self._engine.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        self._saved_bytes = tuple(agreed.tolist())
        if self._config.budget is not None:
            self._budget = int(self._config.budget * sum(self._saved_bytes))
        self._executor = WaveExecutor(self._segments, self._engine.module, found, self._hooks())
        self._report()

    def _actions(self) -> Any:
        body = self._segments.body
        return tick_tock_step(
            len(body) + 1,
            self._engine.gradient_accumulation_steps(),
            pair_order=self._config.pair_order,
            sums_output=[segment.sums_output for segment in body] + [False],
            sums_gradient=[segment.sums_gradient for segment in body]
            + [self._segments.head_sums_gradient],
            saved_bytes=self._saved_bytes,
            budget=self._budget,
        )

    def _report(self) -> None:
        if dist.get_rank() == 0:
            logger.info("wavelet: ...")

    def _hooks(self) -> Hooks:
        return Hooks(
            forward=self._forward,
            begin_backward=self._begin_backward,
            scale=self._scale,
            end_backward=self._end_backward,
        )

    def _forward(self, micro_batch: int) -> AbstractContextManager[Any]:
        return autocast_if_enabled(self._engine)

    def _begin_backward(self, micro_batch: int) -> None:
        engine = self._engine
        if isinstance(engine.optimizer, ZeROOptimizer):
            engine.optimizer.clear_backward_seen_flag()
        # As within engine.backward: hooks leave the end of the backward pass to us.
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count += 1
            engine._running_engine_backward = True
        engine._backward_prologue()

    def _scale(self, loss: Tensor) -> Tensor:
        engine = self._engine
        loss = loss / engine.gradient_accumulation_steps()
        if isinstance(engine.optimizer, ZeROOptimizer):
            loss = engine.optimizer.scale_if_loss(loss)
        elif engine.torch_autocast_z0_gradscaler:
            loss = engine.torch_autocast_z0_gradscaler.scale(loss)
        return loss

    def _end_backward(self, micro_batch: int) -> None:
        self._engine._backward_epilogue()
        self._leave_backward()
        self._engine.step()

    def _leave_backward(self) -> None:
        engine = self._engine
        with engine._running_engine_backward_lock:
            count = max(engine._running_engine_backward_count - 1, 0)
            engine._running_engine_backward_count = count
            engine._running_engine_backward = count > 0


def attach_wavelet(engine: Any, segments: Segments, config: WaveletConfig) -> Wavelet | None:
    """Return what trains an engine's micro-batches as waves; None where there is one only.

    Args:
        engine: Complete.
        segments: Its model.
        config: The section ``wavelet``, with another mode than ``off``.
    """
    if engine.gradient_accumulation_steps() == 1:
        if dist.get_rank() == 0:
            logger.warning(
                "wavelet: gradient_accumulation_steps is 1, so there is no second wave to pair; "
                "training goes on without. Give 2 or more"
            )
        return None
    return Wavelet(engine, segments, config)
