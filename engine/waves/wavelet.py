# SPDX-License-Identifier: Apache-2.0
"""Waves inside a DeepSpeed engine, and the measurement that decides whether they are faster."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from wavemare.engine.observe.choices import tell_choice
from wavemare.engine.waves.passes import Pass, PassRunner
from wavemare.pipeline.config import WaveletConfig
from wavemare.pipeline.plan.plan import Action, Kind
from wavemare.pipeline.wave.gain import Decision, costs_of_segments, decide, predict

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

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
        engine: EngineMixin,
        config: WaveletConfig,
        loss: Callable[[Any, Callable[..., Any]], Tensor],
    ) -> None:
        self._engine = engine
        self._loss = loss
        self._runner = PassRunner(engine.device)
        self._steps = 0
        self.paired = config.mode != "auto"
        if not self.paired:
            self._runner.recorder = self._probe = WaveProbe(engine.device)

    def train(self, batches: Sequence[Any]) -> list[Tensor]:
        """Train one optimizer step; return the losses of its micro-batches, detached."""
        self._steps += 1
        if self._runner.recorder is not None:
            self._watch(len(batches))
        losses = self._train(batches)
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
        return Pass(Kind.FORWARD, number, partial(self._loss, batch, self._engine.call_module))

    def _backward(self, number: int, loss: Tensor) -> Pass:
        return Pass(Kind.BACKWARD, number, partial(self._engine.backward_from, loss))

    def _watch(self, micro_batches: int) -> None:
        """Continue to measure, or decide from the measurements."""
        if self._steps == _PROBE_WARMUPS + 1:
            self._probe.reset()
        elif self._steps == _PROBE_WARMUPS + _PROBE_STEPS + 1:
            decision = self._probe.decide(micro_batches)
            self.paired, self._runner.recorder = decision.on, None
            tell_choice("wavemare.wavelet.mode", "sync" if decision.on else "off", decision.reason)


def attach_wavelet(
    engine: EngineMixin,
    config: WaveletConfig,
    loss: Callable[[Any, Callable[..., Any]], Tensor],
) -> Wavelet | None:
    """Return what trains an engine's micro-batches as waves; None where it would not help.

    Args:
        engine: Complete.
        config: The section ``wavelet``.
        loss: See `Wavelet`.
    """
    if config.mode == "off":
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
