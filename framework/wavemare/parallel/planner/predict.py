# SPDX-License-Identifier: Apache-2.0
"""A layout of devices, and what it is predicted to take: time, tokens and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavemare.errors import PlanError, check_number
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.cluster import Cluster, Link
from wavemare.parallel.planner.costs import (
    MemoryModel,
    TimeModel,
    Variant,
    optimizer_s,
    reduction_s,
)
from wavemare.parallel.planner.model import BYTES, ModelCosts
from wavemare.parallel.stages import Cut, pipeline_s
from wavemare.pipeline.plan.partition import balanced_cuts

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
        shares: Samples of each replica in a micro-step.
        micro_steps: Of an optimizer step.
    """

    variant: Variant
    units: tuple[tuple[Unit, ...], ...]
    bounds: tuple[int, ...]
    shares: tuple[int, ...]
    micro_steps: int


class Scene:
    """What all layouts of a search have in common.

    Args:
        costs: Of the model.
        cluster: Its devices.
        settings: Of the search.
    """

    def __init__(self, costs: ModelCosts, cluster: Cluster, settings: Settings) -> None:
        self.costs = costs
        self.cluster = cluster
        self.settings = settings
        self.kind_of = [cluster.types.index(device.type) for device in cluster.devices]
        self._times: dict[tuple[int, bool], TimeModel] = {}
        self._memory: dict[Variant, MemoryModel] = {}
        self._equal: dict[int, tuple[int, ...]] = {}
        self.cuts: dict[object, Cut | None] = {}
        """Cuts that were found before, by what they depend on."""

    def usable(self, device: int) -> float:
        """Return the bytes of a device that a plan may need."""
        return self.cluster.devices[device].memory_bytes * (1 - self.settings.margin)

    def usable_of_type(self, kind: int) -> float:
        """Return the bytes that a plan may need of the smallest device of a type."""
        return self.cluster.kinds[kind].memory_bytes * (1 - self.settings.margin)

    def link_of_type(self, kind: int) -> Link:
        """Return the link over which a stage on a device of a type is reached, at worst."""
        cluster = self.cluster
        own = {device.node for device in cluster.devices if device.type == cluster.types[kind]}
        everywhere = {device.node for device in cluster.devices}
        links = [cluster.link(a, b) for a in own for b in everywhere]
        return max(links, key=lambda link: link.seconds(self.costs.boundary_bytes))

    def equal_cuts(self, stages: int) -> tuple[int, ...]:
        """Return the bounds of stages of equal work."""
        if stages not in self._equal:
            work = [layer.flops for layer in self.costs.layers]
            self._equal[stages] = balanced_cuts(work, stages)
        return self._equal[stages]

    def times(self, variant: Variant) -> TimeModel:
        """Return the time model of a variant."""
        key = (variant.tensor_parallel, variant.recompute)
        if key not in self._times:
            parts, recompute = key
            self._times[key] = TimeModel(self.costs, self.cluster, parts, recompute=recompute)
        return self._times[key]

    def memory(self, variant: Variant) -> MemoryModel:
        """Return the memory model of a variant."""
        if variant not in self._memory:
            self._memory[variant] = MemoryModel.of(self.costs, variant)
        return self._memory[variant]

    def replica_s(self, variant: Variant, stage_s: list[float], micro_steps: int) -> float:
        """Return the time of one replica's step, before gradients are reduced.

        A pipeline that never drains takes the slowest stage's time for each micro-batch.
        """
        if variant.schedule == "pipemare":
            return micro_steps * max(stage_s)
        return pipeline_s(stage_s, micro_steps)

    def stage_times(self, layout: Candidate, replica: int) -> list[float]:
        """Return the time of each stage of a replica for a micro-batch, with its messages."""
        times, samples = self.times(layout.variant), layout.shares[replica]
        seconds = []
        before: str | None = None
        for stage, replicas in enumerate(layout.units):
            device = replicas[replica][0]
            first, end = layout.bounds[stage], layout.bounds[stage + 1]
            spent = times.span_s(self.kind_of[device], samples, first, end)
            node = self.cluster.devices[device].node
            if before is not None:
                spent += times.message_s(self.cluster.link(before, node), samples)
            before = node
            seconds.append(spent)
        return seconds

    def memory_of(self, layout: Candidate) -> tuple[float, ...]:
        """Return the bytes that each rank needs."""
        model = self.memory(layout.variant)
        in_flight = layout.variant.in_flight(layout.micro_steps)
        needed = []
        for stage, replicas in enumerate(layout.units):
            first, end = layout.bounds[stage], layout.bounds[stage + 1]
            for replica, unit in enumerate(replicas):
                size = model.needed(first, end, in_flight[stage], layout.shares[replica])
                needed += [size] * len(unit)
        return tuple(needed)

    def predict(self, layout: Candidate) -> Prediction | None:
        """Return what a layout takes; None where it does not fit into memory."""
        memory = self.memory_of(layout)
        order = device_order(layout)
        if any(size > self.usable(d) for size, d in zip(memory, order, strict=True)):
            return None
        variant, replicas = layout.variant, range(layout.variant.data_parallel)
        table = [self.stage_times(layout, replica) for replica in replicas]
        rank_s = tuple(self.replica_s(variant, row, layout.micro_steps) for row in table)
        step_s = max(rank_s) + max(self._end_s(layout, stage) for stage in range(variant.stages))
        tokens = self.settings.global_batch * self.costs.sequence
        return Prediction(
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            stage_s=tuple(max(column) for column in zip(*table, strict=True)),
            rank_s=rank_s,
            memory_bytes=memory,
        )

    def _end_s(self, layout: Candidate, stage: int) -> float:
        """Return what a stage's reduction and optimizer step take at the end."""
        variant = layout.variant
        first, end = layout.bounds[stage], layout.bounds[stage + 1]
        layers = self.costs.layers[first:end]
        parameters = sum(layer.parameters for layer in layers) / variant.tensor_parallel
        devices = [self.cluster.devices[unit[0]] for unit in layout.units[stage]]
        nodes = [device.node for device in devices]
        link = self.cluster.slowest_link(nodes, single=len(set(nodes)) == len(nodes))
        reduced = reduction_s(
            link.shared(self._groups_between(layout, set(nodes))),
            parameters * BYTES[self.costs.dtype],
            variant,
            layout.micro_steps,
            end - first,
        )
        return reduced + max(optimizer_s(device, parameters, variant) for device in devices)

    def _groups_between(self, layout: Candidate, nodes: set[str]) -> int:
        """Return how many groups of replicas reduce over the links of some nodes at once."""
        if len(nodes) == 1:
            return 1
        groups = 0
        for replicas in layout.units:
            own = {self.cluster.devices[unit[0]].node for unit in replicas}
            groups += len(own) > 1 and bool(own & nodes)
        return groups * layout.variant.tensor_parallel

    def plan(self, layout: Candidate, predicted: Prediction) -> Layout:
        """Return a layout as a plan."""
        variant, order = layout.variant, device_order(layout)
        layers = len(self.costs.layers)
        as_they_come = order == tuple(range(len(order)))
        return Layout(
            stages=variant.stages,
            tensor_parallel=variant.tensor_parallel,
            data_parallel=variant.data_parallel,
            cuts=layout.bounds if variant.stages > 1 else None,
            num_layers=layers,
            schedule=variant.schedule,
            zero_stage=variant.zero_stage,
            recompute=variant.recompute,
            global_batch=self.settings.global_batch,
            micro_steps=layout.micro_steps,
            shares=layout.shares,
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
        keep: How many plans are returned.

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
