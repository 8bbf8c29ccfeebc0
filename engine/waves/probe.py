# SPDX-License-Identifier: Apache-2.0
"""Measures passes and collectives of a model's segments, to decide whether waves are faster."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist

from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.plan.action import COLLECTIVES, COMPUTE, Action, Kind
from wavemare.pipeline.wave.gain import Decision, decide, predict

__all__ = ["WaveProbe"]


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

    def decide(self, micro_batches: int, **plan: Any) -> Decision:
        """Return whether waves are faster; collective, and the same on all ranks.

        Args:
            micro_batches: Per optimizer step.
            plan: Other arguments of `predict`.
        """
        predicted = predict(self.costs(), self._num_segments, micro_batches, **plan)
        return decide(predicted, micro_batches)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
