# SPDX-License-Identifier: Apache-2.0
"""Which axes, memory settings and micro-steps are legal for a model on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from wavemare.parallel.planner.layout import Scene, Unit
from wavemare.parallel.planner.memory import Variant
from wavemare.parallel.planner.shares import divisors

__all__ = ["units_as_they_come", "units_by_type", "variants", "whole_micro_steps"]

_GRADIENTS, _WEIGHTS = 2, 3
_MOST_COUNTS = 16


def variants(scene: Scene) -> Iterator[Variant]:
    """Yield all variants that some units of devices can run."""
    settings, costs = scene.settings, scene.costs
    devices = len(scene.cluster.devices)
    for parts in divisors(devices):
        if parts > settings.max_tensor_parallel or not costs.splits(parts):
            continue
        if units_by_type(scene, parts) is None:
            continue
        for stages in divisors(devices // parts):
            if stages > min(settings.max_stages, len(costs.layers)):
                continue
            axes = Variant(
                stages=stages,
                tensor_parallel=parts,
                data_parallel=devices // parts // stages,
            )
            yield from _ways(scene, axes)


def _ways(scene: Scene, axes: Variant) -> Iterator[Variant]:
    """Yield the legal combinations of ZeRO, recomputation, schedule and waves."""
    settings = scene.settings
    schedules = ["1f1b"]
    if settings.pipemare and axes.stages > 1:
        schedules.append("pipemare")
    recompute = (False, True) if settings.recompute else (False,)
    waves = (False, True) if settings.waves and axes.tensor_parallel > 1 else (False,)
    for zero, again, schedule, wave in product(settings.zero_stages, recompute, schedules, waves):
        useless = zero > min(settings.zero_stages) and axes.data_parallel == 1
        piped = zero >= _GRADIENTS and axes.stages > 1
        split = zero == _WEIGHTS and axes.tensor_parallel > 1
        # ZeRO-less 16-bit optimizers of DeepSpeed clip split weights by one rank's norm.
        unclipped = (
            zero == 0
            and axes.tensor_parallel > 1
            and (scene.costs.dtype == "fp16" or (scene.costs.dtype == "bf16" and axes.stages == 1))
        )
        undrained = wave and schedule == "pipemare"
        if not (piped or split or unclipped or undrained) and not (
            useless and not (zero == 1 and _needs_zero(scene, axes))
        ):
            yield replace(axes, zero_stage=zero, recompute=again, schedule=schedule, waves=wave)


def _needs_zero(scene: Scene, axes: Variant) -> bool:
    return axes.tensor_parallel > 1 and scene.costs.dtype != "fp32"


def whole_micro_steps(scene: Scene, replicas: int) -> list[int]:
    """Return numbers of micro-steps that leave each replica whole samples on average.

    Where there are many, some of them: all small ones, and a spread of the others.
    """
    samples = scene.settings.global_batch
    counts = [n for n in divisors(samples) if samples // n >= replicas]
    counts = [n for n in counts if samples // n % replicas == 0]
    if len(counts) <= _MOST_COUNTS:
        return counts
    last = len(counts) - 1
    chosen = {round(place * last / (_MOST_COUNTS - 1)) for place in range(_MOST_COUNTS)}
    return [counts[place] for place in sorted(chosen)]


def units_by_type(scene: Scene, parts: int) -> list[list[Unit]] | None:
    """Return for each type its units, node by node; None where a node's do not come out even."""
    cluster = scene.cluster
    units: list[list[Unit]] = []
    for kind in range(len(cluster.types)):
        by_node: dict[str, list[int]] = {}
        for index, device in enumerate(cluster.devices):
            if scene.kind_of[index] == kind:
                by_node.setdefault(device.node, []).append(index)
        found: list[Unit] = []
        for members in by_node.values():
            if len(members) % parts:
                return None
            found += [tuple(members[i : i + parts]) for i in range(0, len(members), parts)]
        units.append(found)
    return units


def units_as_they_come(scene: Scene, parts: int) -> list[Unit] | None:
    """Return units of consecutive devices; None where one would span types or nodes."""
    count = len(scene.cluster.devices)
    units = [tuple(range(first, first + parts)) for first in range(0, count, parts)]
    for unit in units:
        members = [scene.cluster.devices[index] for index in unit]
        if len({(device.type, device.node) for device in members}) > 1:
            return None
    return units
