# SPDX-License-Identifier: Apache-2.0
"""How long layers, stages and reductions take on each type of device."""

from __future__ import annotations

from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from wavemare.parallel.planner.cluster import Cluster, Device, Link
from wavemare.parallel.planner.memory import Variant
from wavemare.parallel.planner.model import BYTES, ModelCosts

__all__ = ["TimeModel", "optimizer_s", "reduction_s", "ring_s"]

_BACKWARD = 2.0
"""A backward pass takes twice the forward pass."""

_RESULTS = 2  # each number is written once and read once
_ADAM_TRAFFIC = 28  # bytes of a weight's step: read four numbers of fp32, write three
_GRADIENTS, _WEIGHTS = 2, 3
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
        self._totals_of = cache(self._totals)

    @cached_property
    def work(self) -> float:
        """Operations of a sample's passes on one of the ranks that share it."""
        return float((self._flops * self._passes).sum())

    def seconds(self, kind: int, samples: int) -> NDArray[np.float64]:
        """Return the time of each layer's passes of a micro-batch."""
        seconds: NDArray[np.float64] = np.diff(self._totals_of(kind, samples))
        return seconds

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
