# SPDX-License-Identifier: Apache-2.0
"""What a stage costs, and what a layout of devices is predicted to take: time, tokens, memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wavemare.errors import PlanError, check_number
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.cluster import Cluster, Device, Link
from wavemare.parallel.planner.model import BYTES, ModelCosts
from wavemare.parallel.planner.timing import Hop, estimated_ends, pipeline_ends
from wavemare.parallel.stages import Cut
from wavemare.pipeline.plan.orders import ahead
from wavemare.pipeline.plan.partition import balanced_cuts, segments

RESERVE = 1.13
"""Factor on all that is counted: 5 % for workspace, 8 % for what the allocator cannot use."""

_ADAM = 12  # with 16-bit weights: the weight, mean and variance in fp32
_ADAM_FP32 = 8  # mean and variance
_FP32 = 4
_HISTORY = 8  # PipeMare: up to two older weights, or a mean of their changes, in fp32
_GRADIENTS, _WEIGHTS = 2, 3  # the ZeRO stages from which these are partitioned


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What of a layout decides about memory, apart from cuts, shares and micro-steps.

    Args:
        stages: Pipeline stages.
        tensor_parallel: Ranks that share each layer.
        data_parallel: Replicas.
        zero_stage: ZeRO stage.
        recompute: Whether blocks are computed again in the backward pass.
        schedule: ``1f1b`` or ``pipemare``.
        slack: How many micro-batches more each stage runs ahead of the next one.
        experts: Ranks of a stage that share the experts of each layer.
    """

    stages: int
    tensor_parallel: int
    data_parallel: int
    zero_stage: int = 0
    recompute: bool = False
    schedule: str = "1f1b"
    slack: int = 0
    experts: int = 1

    @property
    def drains(self) -> bool:
        """Whether the pipeline is emptied at each step."""
        return self.schedule != "pipemare"

    def in_flight(self, micro_steps: int) -> tuple[int, ...]:
        """Return for each stage the micro-batches whose activations it keeps at a time.

        1F1B keeps ``min(M, P - p)``; PipeMare never drains, so that M bounds nothing.
        """
        most = [ahead(stage, self.stages, self.slack) + 1 for stage in range(self.stages)]
        return tuple(most) if not self.drains else tuple(min(micro_steps, n) for n in most)


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
        parts = variant.tensor_parallel
        # Experts that are divided are whole on the ranks that split the other layers.
        held = [
            (layer.parameters - layer.expert_parameters + copies * layer.tied_parameters) / parts
            + layer.expert_parameters / max(parts, variant.experts)
            for layer in costs.layers
        ]
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
        return cls(weight * np.asarray(held), np.asarray(kept), working)

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
        self._passes_of_sums = 2.0 + (blocks if recompute else 0.0)
        self._sums = np.asarray([layer.sums for layer in layers]) * self._passes_of_sums
        self._routed = np.asarray([layer.routed for layer in layers])
        self.work = float((self._flops * self._passes).sum())
        self._totals_of = cache(self._totals)

    def seconds(self, kind: int, samples: int) -> NDArray[np.float64]:
        """Return the time of each layer's passes of a micro-batch."""
        return np.diff(self._totals_of(kind, samples))

    def span_s(self, kind: int, samples: int, first: int, end: int) -> float:
        """Return the time of a stage of the layers [first, end), without messages."""
        totals = self._totals_of(kind, samples)
        return float(totals[end] - totals[first])

    def hop(self, link: Link, samples: int) -> Hop:
        """Return what a link is between two stages; either direction has one message."""
        return Hop(link.alpha_s, self._costs.boundary_bytes * samples / link.bytes_s)

    def routes_s(self, link: Link, samples: int, ranks: int, first: int, end: int) -> float:
        """Return the time of the exchanges with experts of the layers [first, end).

        Two for each pass: to the experts, and back.

        Args:
            link: The slowest between the ranks.
            samples: Of a micro-batch.
            ranks: Among which experts are divided.
            first: The first layer.
            end: The one after the last.
        """
        routed = float((self._routed * self._passes_of_sums)[first:end].sum())
        count = float(((self._routed > 0) * self._passes_of_sums)[first:end].sum())
        if ranks == 1 or not count:
            return 0.0
        size = self._costs.boundary_bytes * samples * routed / count
        return 2 * count * ring_s(link, size, ranks, passes=1)

    def _totals(self, kind: int, samples: int) -> NDArray[np.float64]:
        device = self._cluster.kinds[kind]
        moved = (self._weights + samples * self._results) / (device.memory_gb_s * 1e9)
        forward = np.maximum(self._flops * samples / device.rate, moved)
        seconds = self._passes * forward + device.overhead_s * self._blocks
        size = self._costs.boundary_bytes * samples
        seconds += self._sums * ring_s(self._cluster.within, size, self._parts)
        return np.concatenate([[0.0], np.cumsum(seconds)])


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


_LARGEST_BATCH = 2**31
Unit = tuple[int, ...]
"""Devices, by their index, that share a model's layers: of one type, in one node."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Which units run which stages of which replicas, and with how many samples.

    Args:
        variant: Its axes and what decides about memory.
        units: ``units[stage][replica]``.
        bounds: Of the stages.
        own_bounds: For each replica those of its stages, where they differ; else None.
        shares: Samples of each replica in a micro-step.
        micro_steps: Of an optimizer step.
    """

    variant: Variant
    units: tuple[tuple[Unit, ...], ...]
    bounds: tuple[int, ...]
    shares: tuple[int, ...]
    micro_steps: int
    own_bounds: tuple[tuple[int, ...], ...] | None = None

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """The bounds of each replica's stages."""
        return self.own_bounds or (self.bounds,) * self.variant.data_parallel

    def cut(self, cuts: tuple[tuple[int, ...], ...]) -> Candidate:
        """Return the same with other bounds for each replica."""
        own = cuts if len(set(cuts)) > 1 else None
        return replace(self, bounds=cuts[0], own_bounds=own)


class Scene:
    """What all layouts of a search have in common.

    Args:
        costs: Of the model.
        cluster: Its devices.
        settings: Of the search.
        origin: The place of each device in the cluster of the search, of which this one may lack
            some; as they come if omitted.
    """

    def __init__(
        self,
        costs: ModelCosts,
        cluster: Cluster,
        settings: Settings,
        origin: Sequence[int] | None = None,
    ) -> None:
        self.costs = costs
        self.cluster = cluster
        self.settings = settings
        self.origin = tuple(range(len(cluster.devices)) if origin is None else origin)
        self.kind_of = [cluster.types.index(device.type) for device in cluster.devices]
        self._times = cache(partial(TimeModel, costs, cluster))
        self.memory = cache(partial(MemoryModel.of, costs))
        """From a variant to its memory model."""
        work = [layer.flops for layer in costs.layers]
        self.equal_cuts = cache(partial(balanced_cuts, work))
        """From a number of stages to the bounds of stages of equal work."""
        self.cuts: dict[object, Cut | None] = {}
        """Cuts that were found before, by what they depend on."""

    def usable(self, device: int) -> float:
        """Return the bytes of a device that a layout may need."""
        return self.cluster.devices[device].memory_bytes * (1 - self.settings.margin)

    def usable_of_type(self, kind: int) -> float:
        """Return the bytes that a layout may need of the smallest device of a type."""
        return self.cluster.kinds[kind].memory_bytes * (1 - self.settings.margin)

    def node(self, device: int) -> str:
        """Return the name of a device's node."""
        return self.cluster.devices[device].node

    def times(self, variant: Variant) -> TimeModel:
        """Return the time model of a variant."""
        return self._times(variant.tensor_parallel, recompute=variant.recompute)

    def stage_times(self, layout: Candidate, replica: int) -> list[float]:
        """Return the time of each stage of a replica for a micro-batch, without its messages."""
        variant, samples = layout.variant, layout.shares[replica]
        times, bounds = self.times(variant), layout.cuts[replica]
        seconds = []
        for stage, replicas in enumerate(layout.units):
            first, end = bounds[stage], bounds[stage + 1]
            spent = times.span_s(self.kind_of[replicas[replica][0]], samples, first, end)
            if variant.experts > 1:
                span = variant.experts // variant.tensor_parallel
                begin = replica // span * span
                nodes = [self.node(unit[0]) for unit in replicas[begin : begin + span]]
                link = self.cluster.slowest_link(nodes)
                spent += times.routes_s(link, samples, variant.experts, first, end)
            seconds.append(spent)
        return seconds

    def hops(self, layout: Candidate, replica: int) -> tuple[Hop, ...]:
        """Return what lies between the stages of a replica; replicas share links of nodes."""
        times, found = self.times(layout.variant), []
        for before, after in pairwise(layout.units):
            pairs = [
                frozenset((self.node(a[0]), self.node(b[0])))
                for a, b in zip(before, after, strict=True)
            ]
            own = pairs[replica]
            users = pairs.count(own) * layout.variant.tensor_parallel if len(own) > 1 else 1
            link = self.cluster.link(self.node(before[replica][0]), self.node(after[replica][0]))
            found.append(times.hop(link.shared(users), layout.shares[replica]))
        return tuple(found)

    def memory_of(self, layout: Candidate) -> tuple[float, ...]:
        """Return the bytes that each rank needs."""
        model, cuts = self.memory(layout.variant), layout.cuts
        in_flight = layout.variant.in_flight(layout.micro_steps)
        needed = []
        for stage, replicas in enumerate(layout.units):
            for replica, unit in enumerate(replicas):
                first, end = cuts[replica][stage : stage + 2]
                size = model.needed(first, end, in_flight[stage], layout.shares[replica])
                needed += [size] * len(unit)
        return tuple(needed)

    def predict(self, layout: Candidate, *, roughly: bool = False) -> Prediction | None:
        """Return what a layout takes; None where it does not fit into memory.

        Args:
            layout: The candidate.
            roughly: Whether to estimate the time of its pipelines, rather than to run them.
        """
        memory = self.memory_of(layout)
        order = device_order(layout)
        if any(size > self.usable(d) for size, d in zip(memory, order, strict=True)):
            return None
        variant, replicas = layout.variant, range(layout.variant.data_parallel)
        table = [tuple(self.stage_times(layout, replica)) for replica in replicas]
        find = estimated_ends if roughly else pipeline_ends
        ends = [
            find(
                row,
                self.hops(layout, replica),
                layout.micro_steps,
                variant.slack,
                drains=variant.drains,
            )
            for replica, row in enumerate(table)
        ]
        step_s = self._end_s(layout, ends)
        tokens = self.settings.global_batch * self.costs.sequence
        return Prediction(
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            stage_s=tuple(max(column) for column in zip(*table, strict=True)),
            rank_s=tuple(max(row) for row in ends),
            memory_bytes=memory,
        )

    def _end_s(self, layout: Candidate, ends: Sequence[Sequence[float]]) -> float:
        """Return when all ranks have reduced their gradients and stepped.

        Replicas reduce what none of them cuts together, one such segment after the other, as soon
        as all ranks that have it are done.

        Args:
            layout: The candidate.
            ends: For each replica and stage the end of its passes.
        """
        variant, cuts = layout.variant, layout.cuts
        free = [list(row) for row in ends]
        last, tied = variant.stages - 1, sum(each.tied_parameters for each in self.costs.layers)
        if tied and last:
            for replica, row in enumerate(free):
                nodes = [self.node(layout.units[stage][replica][0]) for stage in (0, last)]
                size = tied / variant.tensor_parallel * BYTES[self.costs.dtype]
                link = self.cluster.link(*nodes)
                row[0] = row[last] = max(row[0], row[last]) + ring_s(link, size, 2)
        for first, end in segments(cuts):
            stages = [bisect_right(bounds, first) - 1 for bounds in cuts]
            begin = max(row[stage] for row, stage in zip(free, stages, strict=True))
            units = [layout.units[stage][replica] for replica, stage in enumerate(stages)]
            reduced = begin + self._reduction_s(layout, units, first, end)
            for row, stage in zip(free, stages, strict=True):
                row[stage] = reduced
        return max(
            row[stage] + self._optimizer_s(layout, replica, stage)
            for replica, row in enumerate(free)
            for stage in range(variant.stages)
        )

    def _reduction_s(self, layout: Candidate, units: Sequence[Unit], first: int, end: int) -> float:
        """Return what the replicas' reduction of some layers takes."""
        variant, layers = layout.variant, self.costs.layers[first:end]
        nodes = [self.node(unit[0]) for unit in units]
        link = self.cluster.slowest_link(nodes, single=len(set(nodes)) == len(nodes))
        link = link.shared(self._groups_between(layout, set(nodes)))
        experts = sum(layer.expert_parameters for layer in layers)
        others = sum(layer.parameters for layer in layers) - experts
        size, parts = BYTES[self.costs.dtype], variant.tensor_parallel
        if variant.experts == 1:
            others, experts = others + experts, 0
        steps, count = layout.micro_steps, end - first
        spent = reduction_s(link, others / parts * size, variant, steps, count)
        if experts:
            own = replace(variant, data_parallel=variant.data_parallel * parts // variant.experts)
            spent += reduction_s(link, experts / variant.experts * size, own, steps, count)
        return spent

    def _optimizer_s(self, layout: Candidate, replica: int, stage: int) -> float:
        first, end = layout.cuts[replica][stage : stage + 2]
        layers = self.costs.layers[first:end]
        parameters = sum(layer.parameters for layer in layers) / layout.variant.tensor_parallel
        device = self.cluster.devices[layout.units[stage][replica][0]]
        return optimizer_s(device, parameters, layout.variant)

    def _groups_between(self, layout: Candidate, nodes: set[str]) -> int:
        """Return how many groups of replicas reduce over the links of some nodes at once."""
        if len(nodes) == 1:
            return 1
        groups = 0
        for replicas in layout.units:
            own = {self.node(unit[0]) for unit in replicas}
            groups += len(own) > 1 and bool(own & nodes)
        return max(groups, 1) * layout.variant.tensor_parallel

    def layout(self, candidate: Candidate, predicted: Prediction) -> Layout:
        """Return a candidate as the layout that is written."""
        variant = candidate.variant
        order = tuple(self.origin[device] for device in device_order(candidate))
        layers = len(self.costs.layers)
        as_they_come = order == tuple(range(len(order)))
        return Layout(
            stages=variant.stages,
            tensor_parallel=variant.tensor_parallel,
            data_parallel=variant.data_parallel,
            cuts=candidate.bounds if variant.stages > 1 else None,
            replica_cuts=candidate.own_bounds,
            num_layers=layers,
            schedule=variant.schedule,
            slack=variant.slack,
            expert_parallel=variant.experts,
            zero_stage=variant.zero_stage,
            recompute=variant.recompute,
            global_batch=self.settings.global_batch,
            micro_steps=candidate.micro_steps,
            shares=candidate.shares,
            order=None if as_they_come else order,
            predicted=predicted,
        )


def device_order(layout: Candidate) -> tuple[int, ...]:
    """Return the device of each rank."""
    return tuple(device for replicas in layout.units for unit in replicas for device in unit)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and assumptions of a search.

    Args:
        global_batch: Samples of one optimizer step.
        margin: Part of each device's memory that stays free, 0 to below 1.
        pipemare: Whether asynchronous pipelines are offered. They change the mathematics.
        recompute: Whether recomputed activations are offered.
        zero_stages: Stages of ZeRO that are offered.
        max_stages: The longest pipeline.
        max_tensor_parallel: The most ranks that share a layer.
        leave_out: Whether layouts may leave devices out.
        keep: How many layouts are returned.

    Raises:
        PlanError: A number is out of range.
    """

    global_batch: int
    margin: float = 0.05
    pipemare: bool = False
    recompute: bool = True
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    max_stages: int = 16
    max_tensor_parallel: int = 8
    leave_out: bool = True
    keep: int = 5

    def __post_init__(self) -> None:
        for name in ("global_batch", "max_stages", "max_tensor_parallel", "keep"):
            check_number(PlanError, name, getattr(self, name), 1, whole=True)
        if self.global_batch > _LARGEST_BATCH:
            reason = "the search through its parts would take too long"
            remedy = f"Give at most {_LARGEST_BATCH}"
            raise PlanError("global_batch", self.global_batch, reason, remedy)
        check_number(PlanError, "margin", self.margin, 0, 1)
        stages = self.zero_stages
        if not isinstance(stages, Sequence) or not stages or any(s not in range(4) for s in stages):
            reason = "these are no stages of ZeRO"
            raise PlanError("zero_stages", self.zero_stages, reason, "Give some of 0, 1, 2 and 3")
