# SPDX-License-Identifier: Apache-2.0
"""Waves inside a DeepSpeed engine, and the measurement that decides whether they are faster."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor
from torch import distributed as dist

from wavemare.engine.context import EngineContext
from wavemare.engine.seams import discard_open_step
from wavemare.engine.waves.passes import Pass, PassRunner
from wavemare.pipeline.config import WaveletConfig
from wavemare.pipeline.plan.plan import Action, Kind
from wavemare.pipeline.wave.gain import Decision, costs_of_segments, decide, predict

logger = logging.getLogger("wavemare")

_PROBE_WARMUPS, _PROBE_STEPS = 1, 2
"""Optimizer steps of plain accumulation before the measured ones, and these."""


class Wavelet:
    """Trains the micro-batches of an optimizer step as two waves.

    Args:
        engine: A data-parallel engine.
        config: The section ``wavelet``.
        loss: From a micro-batch to its loss, given what calls the module.

    Attributes:
        paired: Whether the next step pairs micro-batches.
    """

    def __init__(
        self,
        engine: EngineContext,
        config: WaveletConfig,
        loss: Callable[[Any, Callable[..., Any]], Tensor],
    ) -> None:
        self._engine = engine
        self._loss = loss
        self._protocol = AccumulationProtocol(engine)
        self._runner = PassRunner(engine.device)
        if config.compile:
            engine.module.compile()
        self._steps = 0
        self.paired = config.mode != "auto"
        if not self.paired:
            self._runner.recorder = self._probe = WaveProbe(engine.device)

    def train(self, batches: Sequence[Any]) -> list[Tensor]:
        """Train one optimizer step; return the losses of its micro-batches, detached."""
        self._steps += 1
        if self._runner.recorder is not None:
            self._watch(len(batches))
        try:
            losses = self._train(batches)
        except BaseException:
            self._protocol.discard_step()
            raise
        if self._steps == 1 and not self._runner.collectives and dist.get_rank() == 0:
            logger.warning(
                "wavelet: a pass has no collective that could run behind another pass, so waves "
                "train as gradient accumulation; use tensor_parallel or expert_parallel"
            )
        return losses

    def _train(self, batches: Sequence[Any]) -> list[Tensor]:
        losses: list[Tensor] = []
        loss = self._runner.alone(self._forward(0, batches[0]))
        for number, following in enumerate(batches[1:], 1):
            backward, forward = self._backward(number - 1, loss), self._forward(number, following)
            losses.append(loss.detach())
            if self.paired:
                _, loss = self._runner.pair(backward, forward)
                self._engine.end_micro_batch(last=False)
            else:
                self._runner.alone(backward)
                self._engine.end_micro_batch(last=False)
                loss = self._runner.alone(forward)
        self._runner.alone(self._backward(len(batches) - 1, loss))
        self._engine.end_micro_batch(last=True)
        return [*losses, loss.detach()]

    def _forward(self, number: int, batch: Any) -> Pass:
        return Pass(Kind.FORWARD, number, partial(self._loss, batch, self._protocol.forward))

    def _backward(self, number: int, loss: Tensor) -> Pass:
        return Pass(Kind.BACKWARD, number, partial(self._protocol.backward, loss))

    def _watch(self, micro_batches: int) -> None:
        """Continue to measure, or decide from the measurements."""
        if self._steps == _PROBE_WARMUPS + 1:
            self._probe.reset()
        elif self._steps == _PROBE_WARMUPS + _PROBE_STEPS + 1:
            decision = self._probe.decide(micro_batches)
            self.paired, self._runner.recorder = decision.on, None
            if dist.get_rank() == 0:
                logger.info("wavelet auto: %s: %s", "on" if decision.on else "off", decision.reason)


def attach_wavelet(
    engine: EngineContext,
    config: WaveletConfig,
    loss: Callable[[Any, Callable[..., Any]], Tensor],
) -> Wavelet | None:
    """Return what trains an engine's micro-batches as waves; None where it would not help.

    Args:
        engine: Complete.
        config: The section ``wavelet``.
        loss: See `Wavelet`.
    """
    if config.mode in ("off", "model_parallel"):
        return None
    reason = ""
    if engine.gradient_accumulation_steps() == 1:
        reason = "gradient_accumulation_steps is 1, so there is no second wave; give 2 or more"
    elif engine.zero_optimization_partition_weights():
        reason = "ZeRO-3 fetches weights in the order of one pass; use ZeRO 0, 1 or 2"
    if reason:
        if dist.get_rank() == 0:
            logger.warning("wavelet: off, training by accumulation: %s", reason)
        return None
    return Wavelet(engine, config, loss)


class WaveProbe:
    """Times the parts of passes in plain accumulation, which waits for every collective at once.

    Args:
        device: Of the model. On a GPU each part ends with a synchronization while the probe runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)

    def now(self) -> float:
        """Return the time, after all that was queued before."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def note(self, action: Action, start_s: float, end_s: float) -> None:
        """Add a measurement."""
        self._seconds[action.kind, action.stage].append(end_s - start_s)

    def reset(self) -> None:
        """Drop all measurements: first passes take longer."""
        self._seconds.clear()

    def decide(self, micro_batches: int) -> Decision:
        """Return whether waves are faster, by the segments' median times on the slowest rank.

        Collective, and the same on all ranks.

        Args:
            micro_batches: Per optimizer step.
        """
        places = sorted(self._seconds)
        medians = torch.tensor(
            [median(self._seconds[place]) for place in places],
            dtype=torch.float64,
            device=self._device,
        )
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        costs = costs_of_segments(dict(zip(places, medians.tolist(), strict=True)))
        return decide(predict(*costs, micro_batches))


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
