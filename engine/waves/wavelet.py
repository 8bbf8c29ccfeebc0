# SPDX-License-Identifier: Apache-2.0
"""Waves inside a DeepSpeed engine, and the measurement that decides whether they are faster."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from wavemare.engine.context import EngineContext, Feature
from wavemare.engine.waves.asynchronous import AsyncWaves
from wavemare.engine.waves.executor import Hooks, WaveExecutor
from wavemare.engine.waves.protocol import AccumulationProtocol
from wavemare.engine.waves.segments import Segment, SegmentProfile, Segments, profile_segments
from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.config import WaveletConfig
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, Action, Kind
from wavemare.pipeline.wave.gain import Decision, decide, peak_bytes, predict
from wavemare.pipeline.wave.schedule import accumulation, tick_tock
from wavemare.pipeline.wave.steps import OpenSteps, checked_step

logger = logging.getLogger("wavemare")

_MIB = 2**20
_PROBE_WARMUPS, _PROBE_STEPS = 1, 2
"""Optimizer steps of plain accumulation before the measured ones, and these."""


class Wavelet(Feature):
    """Trains the micro-batches of an optimizer step as two waves.

    Args:
        engine: A data-parallel engine.
        segments: Its model.
        config: The section ``wavelet``.
    """

    key = "wavelet"

    def __init__(self, engine: EngineContext, segments: Segments, config: WaveletConfig) -> None:
        self._engine = engine
        self._segments = _compiled(segments) if config.compile else segments
        self._config = config
        self._protocol = AccumulationProtocol(engine)
        self._asynchronous = (
            AsyncWaves(engine, config.mode) if config.mode in ("async", "replica") else None
        )
        self._profile: SegmentProfile | None = None
        self._open_executor: WaveExecutor | None = None
        self._steps = 0
        self._paired = config.mode != "auto"
        self._probe = (
            WaveProbe(engine.device, self._num_segments) if config.mode == "auto" else None
        )

    def train(self, batches: Iterator[Any]) -> list[Tensor]:
        """Train one optimizer step.

        Args:
            batches: Micro-batches on the engine's device.

        Returns:
            The losses of its micro-batches, detached.
        """
        if self._profile is None:
            first = next(batches)
            self._prepare(first)
            batches = chain([first], batches)
        self._steps += 1
        if self._probe is not None:
            self._watch(self._probe)
        if self._asynchronous is None or self._steps <= self._config.warmup_steps:
            return self._train_synchronously(batches)
        assert self._open_executor is not None
        try:
            plan = OpenSteps.make(micro_batches=self._micro_batches, **self._shape)
            return self._asynchronous.train(self._open_executor, batches, plan)
        except BaseException:
            self._asynchronous.discard_gradients()
            raise

    @property
    def paired(self) -> bool:
        """Whether the next step pairs micro-batches."""
        return self._paired

    def synchronize(self) -> None:
        """Finish the unfinished micro-batch between two steps, so that the engine can be saved."""
        if self._asynchronous is not None:
            self._asynchronous.synchronize(self._open_executor)

    @property
    def is_drained(self) -> bool:
        """Whether the weights have all gradients."""
        return self._asynchronous is None or self._asynchronous.is_drained

    def drain(self) -> None:
        """Apply all gradients to the weights."""
        if self._asynchronous is not None:
            self._asynchronous.drain(self._open_executor)

    def reset(self) -> None:
        """Drop all micro-batches in flight and all gradients that are not applied."""
        if self._asynchronous is not None:
            self._asynchronous.reset()
            if self._open_executor is not None:
                self._open_executor.discard()

    def extra_state(self) -> dict[str, Any]:
        """Return the state besides weights and optimizer; after `synchronize`."""
        if self._asynchronous is None:
            return {}
        return {"steps": self._steps, **self._asynchronous.state_dict()}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Load a state of `extra_state`; None if a checkpoint has none for this rank."""
        if self._asynchronous is None:
            return
        if state is not None:
            self._steps = state["steps"]
            self._asynchronous.load_state_dict(state)
        elif dist.get_rank() == 0:
            logger.warning(
                "wavelet %s: the checkpoint has no waves of these ranks; they start anew from its "
                "weights",
                self._config.mode,
            )

    def _train_synchronously(self, batches: Iterator[Any]) -> list[Tensor]:
        self._protocol.begin_step()
        if self._paired:
            actions = checked_step(tick_tock, micro_batches=self._micro_batches, **self._shape)
        else:
            actions = checked_step(accumulation, self._num_segments, self._micro_batches)
        try:
            return self._executor.run(actions, batches)
        except BaseException:
            self._protocol.discard_step()
            raise

    def _watch(self, probe: WaveProbe) -> None:
        """Continue to measure, or decide from the measurements."""
        if self._steps == _PROBE_WARMUPS + 1:
            probe.reset()
        elif self._steps == _PROBE_WARMUPS + _PROBE_STEPS + 1:
            decision = probe.decide(self._micro_batches)
            self._paired, self._probe = decision.on, None
            self._executor = self._make_executor(self._protocol.hooks())
            if dist.get_rank() == 0:
                logger.info("wavelet auto: %s: %s", "on" if decision.on else "off", decision.reason)

    def _prepare(self, batch: Any) -> None:
        """Run a batch forward once to measure saved bytes and shared weights."""
        engine = self._engine
        with self._protocol.forward():
            self._profile = profile_segments(self._segments, engine.module, batch)
        hooks = self._protocol.hooks()
        if self._probe is not None:
            hooks = replace(hooks, record=self._probe.record)
        self._executor = self._make_executor(hooks)
        if self._asynchronous is not None:
            self._open_executor = self._make_executor(self._asynchronous.hooks())
        if dist.get_rank() == 0:
            logger.info(self._description())

    def _make_executor(self, hooks: Hooks) -> WaveExecutor:
        assert self._profile is not None
        return WaveExecutor(self._segments, self._engine.module, self._profile, hooks)

    @property
    def _micro_batches(self) -> int:
        return int(self._engine.gradient_accumulation_steps())

    @property
    def _num_segments(self) -> int:
        return len(self._segments.names)

    @property
    def _shape(self) -> dict[str, Any]:
        """Arguments of the plan without the number of micro-batches."""
        return {
            "num_segments": self._num_segments,
            "sums_output": tuple(self._segments.sums_output),
            "sums_gradient": tuple(self._segments.sums_gradient),
        }

    def _description(self) -> str:
        assert self._profile is not None
        saved = self._profile.saved_bytes
        plan = tick_tock(micro_batches=max(2, self._micro_batches), **self._shape)
        peak, one = peak_bytes(plan, saved) / _MIB, sum(saved) / _MIB
        return (
            f"wavelet {self._config.mode}: {self._num_segments} segments; predicted peak of "
            f"activations {peak:.1f} MiB (one wave {one:.1f}, two in phase {2 * one:.1f})"
        )


def attach_wavelet(
    engine: EngineContext, segments: Segments, config: WaveletConfig
) -> Wavelet | None:
    """Return what trains an engine's micro-batches as waves; None where there is one only.

    Args:
        engine: Complete.
        segments: Its model.
        config: The section ``wavelet``, with another mode than ``off``.
    """
    single = engine.gradient_accumulation_steps() == 1
    if single and config.mode not in ("async", "replica"):
        if dist.get_rank() == 0:
            logger.warning(
                "wavelet: gradient_accumulation_steps is 1, so there is no second wave to pair; "
                "training goes on without. Give 2 or more"
            )
        return None
    return Wavelet(engine, segments, config)


def _compiled(segments: Segments) -> Segments:
    def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(run)

    assert segments.head is not None
    body = tuple(
        Segment(s.name, compiled(s.run), s.sums_output, s.sums_gradient) for s in segments.body
    )
    return replace(segments, body=body, head=compiled(segments.head))


class WaveProbe:
    """Times the actions of plain accumulation, which waits for every collective at once.

    Args:
        device: Of the model. On a GPU each action ends with a synchronization while the probe
            runs.
        num_segments: With the head.
    """

    def __init__(self, device: torch.device, num_segments: int) -> None:
        self._device = device
        self._num_segments = num_segments
        self._seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Measure the body."""
        start = self._now()
        yield
        self._seconds[action.kind, action.stage].append(self._now() - start)

    def reset(self) -> None:
        """Drop all measurements: first passes take longer."""
        self._seconds.clear()

    def costs(self) -> Costs:
        """Return the median times, in seconds, of the slowest rank; all ranks must call it."""
        kinds = sorted(COMPUTE | COLLECTIVES)
        medians = torch.tensor(
            [
                [median(self._seconds.get((kind, s), [0.0])) for s in range(self._num_segments)]
                for kind in kinds
            ],
            dtype=torch.float64,
            device=self._device,
        )
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        of = {kind: tuple(row) for kind, row in zip(kinds, medians.tolist(), strict=True)}
        return Costs(
            forward_s=of[Kind.FORWARD],
            backward_s=of[Kind.BACKWARD],
            sum_output_s=of[Kind.SUM_OUTPUT],
            sum_gradient_s=of[Kind.SUM_GRADIENT],
        )

    def decide(self, micro_batches: int) -> Decision:
        """Return whether waves are faster; collective, and the same on all ranks.

        Args:
            micro_batches: Per optimizer step.
        """
        predicted = predict(self.costs(), self._num_segments, micro_batches)
        return decide(predicted, micro_batches)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
