# SPDX-License-Identifier: Apache-2.0
"""How many bytes a rank needs: weights and what belongs to them, and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavemare.parallel.planner.model import BYTES, LayerCost, ModelCosts

__all__ = ["RESERVE", "MemoryModel", "Variant"]

RESERVE = 1.13
"""Factor on all that is counted: 5 % for workspace, 8 % for what the allocator cannot use."""

_ADAM = 12  # with 16-bit weights: the weight, mean and variance in fp32
_ADAM_FP32 = 8  # mean and variance
_FP32 = 4
_HISTORY = 8  # PipeMare: up to two older weights, or a mean of their changes, in fp32
_GRADIENTS, _WEIGHTS = 2, 3  # the ZeRO stages from which these are partitioned


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What of a plan decides about memory, apart from cuts, shares and micro-steps.

    Args:
        stages: Pipeline stages.
        tensor_parallel: Ranks that share each layer.
        data_parallel: Replicas.
        zero_stage: ZeRO stage.
        recompute: Whether blocks are computed again in the backward pass.
        schedule: ``1f1b`` or ``pipemare``.
    """

    stages: int
    tensor_parallel: int
    data_parallel: int
    zero_stage: int = 0
    recompute: bool = False
    schedule: str = "1f1b"

    def in_flight(self, micro_steps: int) -> tuple[int, ...]:
        """Return for each stage the micro-batches whose activations it keeps at a time.

        1F1B keeps ``min(M, P - p)``; PipeMare never drains, so that M bounds nothing.
        """
        ahead = [self.stages - stage for stage in range(self.stages)]
        if self.schedule == "pipemare":
            return tuple(ahead)
        return tuple(min(micro_steps, count) for count in ahead)


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of each layer on one rank, for one variant.

    Args:
        static: (layers,): weights, gradients and optimizer state.
        kept: (layers,): what a sample keeps until its backward pass.
        working: What a sample needs at the time that a block is recomputed.
    """

    static: NDArray[np.float64]
    kept: NDArray[np.float64]
    working: float

    @classmethod
    def of(cls, costs: ModelCosts, variant: Variant) -> MemoryModel:
        """Return the model of a chain and a variant."""
        weight = bytes_of_a_weight(costs.dtype, variant)
        static = [weight * _held(layer, variant.stages) for layer in costs.layers]
        parts = variant.tensor_parallel
        kept = [layer.kept_bytes + layer.split_bytes / parts for layer in costs.layers]
        working = 0.0
        if variant.recompute:
            blocks = [
                size for size, layer in zip(kept, costs.layers, strict=True) if layer.is_block
            ]
            working = max(blocks, default=0.0)
            kept = [
                costs.boundary_bytes if layer.is_block else size
                for size, layer in zip(kept, costs.layers, strict=True)
            ]
        return cls(np.asarray(static) / parts, np.asarray(kept), working)

    def needed(self, first: int, end: int, in_flight: int, samples: int) -> float:
        """Return the bytes that a stage of the layers [first, end) needs.

        Args:
            first: Its first layer.
            end: The layer after its last one.
            in_flight: Micro-batches that it keeps at a time.
            samples: Of one micro-batch.
        """
        kept = float(self.kept[first:end].sum()) * in_flight + self.working
        return RESERVE * (float(self.static[first:end].sum()) + samples * kept)

    def cap(
        self, bounds: Sequence[int], in_flight: Sequence[int], memory_bytes: Sequence[float]
    ) -> int:
        """Return the most samples of a micro-batch that all stages hold; 0 if there are none.

        Args:
            bounds: Of the stages.
            in_flight: For each stage.
            memory_bytes: What the devices of each stage have for us.
        """
        caps = []
        for stage, count in enumerate(in_flight):
            first, end = bounds[stage], bounds[stage + 1]
            left = memory_bytes[stage] - self.needed(first, end, count, 0)
            sample = self.needed(first, end, count, 1) - self.needed(first, end, count, 0)
            # A relative hair, so that rounding cannot let in one sample too many.
            caps.append(int(left * (1 - 1e-9) / sample) if left > 0 else 0)
        return min(caps)


def bytes_of_a_weight(dtype: str, variant: Variant) -> float:
    """Return the bytes of a weight, its gradient and its optimizer state (Adam) on one rank.

    16 bits: the weight 2, its gradient 2, and 4 more where a pipeline sums in fp32; Adam 12 with
    the fp32 weight. fp32: 4, 4 and 8. ZeRO divides the optimizer state, from stage 2 the gradient
    and from stage 3 the weight by the number of replicas. PipeMare keeps older weights.
    """
    replicas, zero = variant.data_parallel, variant.zero_stage
    weight = gradient = float(BYTES[dtype])
    if BYTES[dtype] < _FP32 and variant.stages > 1:
        gradient += _FP32
    state = float(_ADAM_FP32 if dtype == "fp32" else _ADAM)
    total = weight / (replicas if zero >= _WEIGHTS else 1)
    total += gradient / (replicas if zero >= _GRADIENTS else 1)
    total += state / (replicas if zero >= 1 else 1)
    return total + (_HISTORY if variant.schedule == "pipemare" else 0)


def _held(layer: LayerCost, stages: int) -> int:
    """Return the parameters that a stage holds for a layer: copies of tied ones with several."""
    return layer.parameters + (layer.tied_parameters if stages > 1 else 0)
