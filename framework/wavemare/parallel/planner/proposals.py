# SPDX-License-Identifier: Apache-2.0
"""Layouts worth predicting, for given axes and a given number of micro-steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from wavemare.parallel.planner.predict import RESERVE, Candidate, Scene, Unit, Variant
from wavemare.parallel.stages import (
    Cut,
    StageProblem,
    balanced_shares,
    best_order,
    divisors,
    pipeline_s,
)

Grid = tuple[tuple[Unit, ...], ...]

_GRADIENTS, _WEIGHTS = 2, 3
_MOST_COUNTS = 16


def equal_layouts(scene: Scene, variant: Variant, micro_steps: int) -> Iterator[Candidate]:
    """Yield the layout of devices as they come in equal parts, if they form units so."""
    units = units_as_they_come(scene, variant.tensor_parallel)
    if units is None:
        return
    replicas = variant.data_parallel
    share = scene.settings.global_batch // micro_steps // replicas
    rows = range(0, len(units), replicas)
    yield Candidate(
        variant=variant,
        units=tuple(tuple(units[first : first + replicas]) for first in rows),
        bounds=scene.equal_cuts(variant.stages),
        shares=(share,) * replicas,
        micro_steps=micro_steps,
    )


def unlike_layouts(
    scene: Scene, variant: Variant, micro_steps: int, limit_s: float
) -> Iterator[Candidate]:
    """Yield layouts of like devices in each replica, of the same mix in all, and of other mixes.

    Args:
        scene: Of the search.
        variant: The axes, and what decides about memory.
        micro_steps: Of an optimizer step.
        limit_s: The time of a step that is of interest.
    """
    units = units_by_type(scene, variant.tensor_parallel)
    assert units is not None, "variants are made for devices that form units"
    counts = [len(found) for found in units]
    alike = all(number % variant.stages == 0 for number in counts)
    if alike and variant.experts == 1:
        yield from _homogeneous(scene, variant, micro_steps, units)
    several = len(counts) > 1 and variant.stages > 1
    if several and all(number % variant.data_parallel == 0 for number in counts):
        yield from _mixed(scene, variant, micro_steps, units, limit_s)
    if several and variant.data_parallel > 1 and variant.experts == 1:
        yield from _other_mixes(scene, variant, micro_steps, units, limit_s)


def may_cut_apart(scene: Scene, variant: Variant) -> bool:
    """Whether an engine runs replicas of a variant that are cut at layers of their own."""
    several = variant.stages > 1 and variant.data_parallel > 1
    whole = variant.zero_stage == 0 and variant.experts == 1
    return several and whole and variant.drains and scene.costs.dtype == "fp32"


def _homogeneous(
    scene: Scene, variant: Variant, micro_steps: int, units: Sequence[Sequence[Unit]]
) -> Iterator[Candidate]:
    """Yield layouts whose replicas have devices of one type each, and shares by their speed."""
    stages = variant.stages
    kinds = [kind for kind, found in enumerate(units) for _ in range(len(found) // stages)]
    own = _cuts_of_types(scene, variant, micro_steps, kinds)
    choices = [(bounds,) * len(kinds) for bounds in sorted({*own.values()})]
    if may_cut_apart(scene, variant) and len(set(own.values())) > 1:
        choices.append(tuple(own[kind] for kind in kinds))
    for cuts in choices:
        for grid in _placed(units, stages):
            # Replicas in the order of their first devices, so that alike ones stay as they come.
            order = sorted(range(len(kinds)), key=lambda replica: grid[0][replica])
            rows = tuple(tuple(row[replica] for replica in order) for row in grid)
            found = _shared_out(scene, variant, micro_steps, rows, [cuts[r] for r in order])
            if found is None:
                break
            yield found


def _shared_out(
    scene: Scene,
    variant: Variant,
    micro_steps: int,
    units: Grid,
    cuts: Sequence[tuple[int, ...]],
) -> Candidate | None:
    """Return a layout whose replicas get shares by their speed; None where none fit."""
    times, memory = scene.times(variant), scene.memory(variant)
    in_flight = variant.in_flight(micro_steps)
    replicas = range(variant.data_parallel)
    kinds = [[scene.kind_of[row[replica][0]] for row in units] for replica in replicas]
    caps = [
        memory.cap(cuts[replica], in_flight, [scene.usable(row[replica][0]) for row in units])
        for replica in replicas
    ]

    def finish(replica: int, share: int) -> float:
        spans = zip(kinds[replica], pairwise(cuts[replica]), strict=True)
        stage_s = [times.span_s(kind, share, first, end) for kind, (first, end) in spans]
        return pipeline_s(stage_s, micro_steps, variant.schedule)

    samples = scene.settings.global_batch // micro_steps
    shares = balanced_shares(samples, finish, caps, least=1)
    if shares is None:
        return None
    return Candidate(
        variant=variant, units=units, bounds=cuts[0], shares=shares, micro_steps=micro_steps
    ).cut(tuple(cuts))


def _cuts_of_types(
    scene: Scene, variant: Variant, micro_steps: int, kinds: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the best cut of each type by itself; that of equal work has the key -1."""
    equal = scene.equal_cuts(variant.stages)
    found = {-1: equal}
    rates = [scene.cluster.kinds[kind].rate for kind in kinds]
    samples = scene.settings.global_batch // micro_steps
    for kind in sorted(set(kinds)):
        found[kind] = equal
        if variant.stages == 1:
            continue
        share = max(1, round(samples * scene.cluster.kinds[kind].rate / sum(rates)))
        cut = _cut(scene, variant, micro_steps, share, [kind], [variant.stages])
        found[kind] = equal if cut is None else cut.bounds
    return found


def _mixed(
    scene: Scene,
    variant: Variant,
    micro_steps: int,
    units: Sequence[Sequence[Unit]],
    limit_s: float,
) -> Iterator[Candidate]:
    """Yield layouts with the same mix of types in every replica, and equal shares."""
    replicas = variant.data_parallel
    share = scene.settings.global_batch // micro_steps // replicas
    counts = [len(found) // replicas for found in units]
    cut = _cut(scene, variant, micro_steps, share, list(range(len(units))), counts, limit_s)
    if cut is None:
        return
    for by_replica in (True, False):
        used = [0] * len(units)
        grid = []
        for kind in cut.order:
            place, used[kind] = used[kind], used[kind] + 1
            grid.append(tuple(_pick(units[kind], place, counts[kind], replicas, by_replica)))
        yield Candidate(
            variant=variant,
            units=tuple(grid),
            bounds=cut.bounds,
            shares=(share,) * replicas,
            micro_steps=micro_steps,
        )


def _other_mixes(
    scene: Scene,
    variant: Variant,
    micro_steps: int,
    units: Sequence[Sequence[Unit]],
    limit_s: float,
) -> Iterator[Candidate]:
    """Yield layouts whose replicas have unlike mixes of types: the fast ones together, or dealt."""
    stages, replicas = variant.stages, variant.data_parallel
    ranked = sorted(
        ((kind, unit) for kind, found in enumerate(units) for unit in found),
        key=lambda entry: -scene.cluster.kinds[entry[0]].rate,
    )
    together = [ranked[first : first + stages] for first in range(0, len(ranked), stages)]
    dealt: list[list[tuple[int, Unit]]] = [[] for _ in range(replicas)]
    for row in range(stages):
        order = range(replicas) if row % 2 == 0 else reversed(range(replicas))
        for replica, entry in zip(order, ranked[row * replicas :], strict=False):
            dealt[replica].append(entry)
    for members in (together, dealt):
        mixes = [Counter(kind for kind, _ in row) for row in members]
        if all(mix == mixes[0] for mix in mixes) or all(len(mix) == 1 for mix in mixes):
            continue  # these are made elsewhere
        yield from _of_mixes(scene, variant, micro_steps, members, limit_s)


def _of_mixes(
    scene: Scene,
    variant: Variant,
    micro_steps: int,
    members: Sequence[Sequence[tuple[int, Unit]]],
    limit_s: float,
) -> Iterator[Candidate]:
    """Yield the layouts of replicas whose units are known, and not yet their order."""
    samples = scene.settings.global_batch // micro_steps
    speeds = [sum(scene.cluster.kinds[kind].rate for kind, _ in row) for row in members]
    columns, cuts = [], []
    for row, speed in zip(members, speeds, strict=True):
        mix = Counter(kind for kind, _ in row)
        share = max(1, round(samples * speed / sum(speeds)))
        kinds = sorted(mix)
        counts = [mix[kind] for kind in kinds]
        cut = _cut(scene, variant, micro_steps, share, kinds, counts, limit_s)
        if cut is None:
            return
        left = {kind: [unit for own, unit in row if own == kind] for kind in kinds}
        columns.append([left[kinds[place]].pop(0) for place in cut.order])
        cuts.append(cut.bounds)
    grid = tuple(zip(*columns, strict=True))
    choices = [[bounds] * len(cuts) for bounds in sorted(set(cuts))]
    if may_cut_apart(scene, variant):
        choices.append(cuts)
    for chosen in choices:
        found = _shared_out(scene, variant, micro_steps, grid, chosen)
        if found is not None:
            yield found


def _placed(units: Sequence[Sequence[Unit]], stages: int) -> Iterator[Grid]:
    """Yield grids of replicas of one type: neighbours as stages of a replica, or as replicas."""
    for by_replica in (True, False) if stages > 1 else (True,):
        yield tuple(
            tuple(
                unit
                for found in units
                for unit in _pick(found, stage, stages, len(found) // stages, by_replica)
            )
            for stage in range(stages)
        )


def _pick(
    units: Sequence[Unit], place: int, places: int, replicas: int, by_replica: bool
) -> Sequence[Unit]:
    """Return the units that run one of several stages, one for each replica."""
    if by_replica:
        return units[place::places]
    return units[place * replicas : (place + 1) * replicas]


def _cut(
    scene: Scene,
    variant: Variant,
    micro_steps: int,
    samples: int,
    kinds: Sequence[int],
    counts: Sequence[int],
    limit_s: float = math.inf,
) -> Cut | None:
    """Return the best cut and order for micro-batches of some samples on devices of some types."""
    key = (variant, micro_steps, samples, tuple(kinds), tuple(counts))
    if key not in scene.cuts:
        times, memory = scene.times(variant), scene.memory(variant)
        usable = np.asarray([scene.usable_of_type(kind) for kind in kinds])
        problem = StageProblem(
            seconds=np.stack([times.seconds(kind, samples) for kind in kinds]),
            static_bytes=RESERVE * memory.static,
            activation_bytes=RESERVE * samples * memory.kept,
            memory_bytes=usable - RESERVE * samples * memory.working,
            # Stages compute while messages travel; `Scene.predict` knows what cannot be hidden.
            hop_s=np.zeros(len(kinds)),
            in_flight=variant.in_flight(micro_steps),
        )
        # A pipeline that never drains is as fast as its slowest stage: no other time counts.
        limit_s = limit_s if variant.drains else 0.0
        scene.cuts[key] = best_order(problem, counts, micro_steps, limit_s)
    return scene.cuts[key]


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
            for experts in _expert_ranks(scene, axes):
                yield from _ways(scene, replace(axes, experts=experts))


def _expert_ranks(scene: Scene, axes: Variant) -> list[int]:
    """Return over how many ranks of a stage its experts can be divided."""
    count, ranks = scene.costs.experts, axes.data_parallel * axes.tensor_parallel
    sizes = divisors(ranks) if count else [1]
    return [n for n in sizes if n == 1 or (count % n == 0 and n % axes.tensor_parallel == 0)]


def _ways(scene: Scene, axes: Variant) -> Iterator[Variant]:
    """Yield the legal combinations of ZeRO, recomputation and schedule."""
    settings = scene.settings
    schedules = ["1f1b"]
    if settings.pipemare and axes.stages > 1:
        schedules.append("pipemare")
    recompute = (False, True) if settings.recompute else (False,)
    for zero, again, schedule in product(settings.zero_stages, recompute, schedules):
        useless = zero > min(settings.zero_stages) and axes.data_parallel == 1
        piped = zero >= _GRADIENTS and axes.stages > 1
        split = zero == _WEIGHTS and axes.tensor_parallel > 1
        # ZeRO-less 16-bit optimizers of DeepSpeed clip split weights by one rank's norm.
        unclipped = (
            zero == 0
            and axes.tensor_parallel > 1
            and (scene.costs.dtype == "fp16" or (scene.costs.dtype == "bf16" and axes.stages == 1))
        )
        needed = zero == 1 and axes.tensor_parallel > 1 and scene.costs.dtype != "fp32"
        # The same of divided experts.
        unclipped |= axes.experts > 1 and zero == 0 and scene.costs.dtype != "fp32"
        split |= axes.experts > 1 and zero == _WEIGHTS
        if not (piped or split or unclipped or (useless and not needed)):
            yield replace(axes, zero_stage=zero, recompute=again, schedule=schedule)


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
