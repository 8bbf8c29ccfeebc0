# SPDX-License-Identifier: Apache-2.0
"""What a stage costs: bytes of weights, states and activations; seconds on a type of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from wavemare.parallel.planner.cluster import Cluster, Device, Link
from wavemare.parallel.planner.model import BYTES, ModelCosts

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
        # A stage holds a copy of weights that are tied to another one's.
        copies = variant.stages > 1
        held = [layer.parameters + copies * layer.tied_parameters for layer in costs.layers]
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
        return cls(weight * np.asarray(held) / parts, np.asarray(kept), working)

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


_BACKWARD = 2.0
"""A backward pass takes twice the forward pass."""

_RESULTS = 2  # each number is written once and read once
_ADAM_TRAFFIC = 28  # bytes of a weight's step: read four numbers of fp32, write three
_OVERLAP = 0.5


def ring_s(link: Link, size: float, ranks: int, passes: int = 2) -> float:
    """Return the time of a ring all-reduce; of a reduce-scatter or all-gather with one pass.

    Args:
        link: The slowest of the ring.
        size: Bytes that each rank holds.
        ranks: In the ring.
        passes: Times that the data goes round.
    """
    if ranks == 1:
        return 0.0
    return passes * (ranks - 1) * (link.alpha_s + size / ranks / link.bytes_s)


class TimeModel:
    """Seconds of layers on the types of a cluster, for one way to run them.

    ``F = max(operations / rate, bytes / bandwidth)``, a backward pass takes 2F, a recomputed block
    F more; each of a block's tensor-parallel sums is a ring all-reduce.

    Args:
        costs: Of the model.
        cluster: The devices.
        tensor_parallel: Ranks that share each layer.
        recompute: Whether blocks are computed again.

    Attributes:
        work: Operations of a sample's passes on one of the ranks that share it.
    """

    def __init__(
        self,
        costs: ModelCosts,
        cluster: Cluster,
        tensor_parallel: int,
        *,
        recompute: bool = False,
    ) -> None:
        self._costs = costs
        self._cluster = cluster
        self._parts = tensor_parallel
        layers = costs.layers
        size = BYTES[costs.dtype]
        weights = [layer.parameters + layer.tied_parameters for layer in layers]
        self._weights = np.asarray(weights, dtype=np.float64) * size / tensor_parallel
        self._flops = np.asarray([layer.flops for layer in layers]) / tensor_parallel
        results = [layer.kept_bytes + layer.split_bytes / tensor_parallel for layer in layers]
        self._results = _RESULTS * np.asarray(results)
        blocks = np.asarray([layer.is_block for layer in layers], dtype=np.float64)
        self._blocks = blocks
        self._passes = 1 + _BACKWARD + (blocks if recompute else 0.0)
        self._sums = np.asarray([layer.sums for layer in layers]) * (
            2.0 + (blocks if recompute else 0.0)
        )
        self.work = float((self._flops * self._passes).sum())
        self._totals_of = cache(self._totals)

    def seconds(self, kind: int, samples: int) -> NDArray[np.float64]:
        """Return the time of each layer's passes of a micro-batch."""
        return np.diff(self._totals_of(kind, samples))

    def span_s(self, kind: int, samples: int, first: int, end: int) -> float:
        """Return the time of a stage of the layers [first, end), without messages."""
        totals = self._totals_of(kind, samples)
        return float(totals[end] - totals[first])

    def message_s(self, link: Link, samples: int) -> float:
        """Return the time of a micro-batch's activations over a link, and of their gradient."""
        return 2 * link.seconds(self._costs.boundary_bytes * samples)

    def _totals(self, kind: int, samples: int) -> NDArray[np.float64]:
        device = self._cluster.kinds[kind]
        moved = (self._weights + samples * self._results) / (device.memory_gb_s * 1e9)
        forward = np.maximum(self._flops * samples / device.rate, moved)
        seconds = self._passes * forward + device.overhead_s * self._blocks
        seconds += self._sums * self._sum_s(kind, samples)
        return np.concatenate([[0.0], np.cumsum(seconds)])

    def _sum_s(self, kind: int, samples: int) -> float:
        if self._parts == 1:
            return 0.0
        name = self._cluster.types[kind]
        nodes = {device.node for device in self._cluster.devices if device.type == name}
        link = max((self._cluster.link(n, n) for n in nodes), key=lambda link: 1 / link.bytes_s)
        return ring_s(link, self._costs.boundary_bytes * samples, self._parts)


def reduction_s(link: Link, size: float, variant: Variant, micro_steps: int, layers: int) -> float:
    """Return the time of a step that a stage's replicas spend to reduce and gather.

    ZeRO 0 and 1: gradients once, 2 passes. ZeRO 2: gradients each micro-step, weights once, 1 pass
    each. ZeRO 3: weights twice and gradients once each micro-step, layer by layer; passes hide half
    of it. DeepSpeed's other stages hide nothing, unless ``overlap_comm`` is set.

    Args:
        link: The slowest between the replicas.
        size: Bytes of the stage's weights on one rank.
        variant: Has the number of replicas and the ZeRO stage.
        micro_steps: Of a step.
        layers: Of the stage.
    """
    replicas = variant.data_parallel
    if variant.zero_stage == _WEIGHTS:
        gathers = 3 * micro_steps * layers * ring_s(link, size / layers, replicas, passes=1)
        return gathers * (1 - _OVERLAP)
    if variant.zero_stage == _GRADIENTS:
        return (micro_steps + 1) * ring_s(link, size, replicas, passes=1)
    return ring_s(link, size, replicas)


def optimizer_s(device: Device, parameters: float, variant: Variant) -> float:
    """Return the time of an Adam step of a stage's parameters: that of their traffic."""
    shares = variant.data_parallel if variant.zero_stage else 1
    return parameters * _ADAM_TRAFFIC / shares / (device.memory_gb_s * 1e9)
