# SPDX-License-Identifier: Apache-2.0
"""The rule of Metis, written anew from its description, for layouts that our engine runs.

Metis (Um et al., USENIX ATC 2024, "Metis: Fast Automatic Distributed Training on Heterogeneous
GPUs") enumerates sequences of device groups, one for each stage, over orders of the types of
devices. A *data load balancer* gives the members of a group samples by their measured speed, a
*layer load balancer* gives groups layers by theirs. All devices are used. A plan costs the sum of
all stages, the slowest one for each further micro-batch, the activations over the slowest link, and
the slowest group's all-reduce (its section on cost estimation).

What is different here: groups have one size, and a replica has the same samples in all stages, as
in DeepSpeed's grid. So a replica's share is by its speed through the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations

from wavemare.parallel.planner.predict import Candidate, Scene, Variant, ring_s
from wavemare.parallel.planner.proposals import whole_micro_steps
from wavemare.parallel.stages import balanced_shares, divisors
from wavemare.pipeline.plan.partition import balanced_cuts


def metis_layout(scene: Scene) -> Candidate:
    """Return the layout that the rule takes: the one of the least cost."""
    return min(_candidates(scene), key=lambda layout: _cost(scene, layout))


def _candidates(scene: Scene) -> Iterator[Candidate]:
    devices = range(len(scene.cluster.devices))
    kinds = range(len(scene.cluster.types))
    for order in permutations(kinds):
        ranked = sorted(devices, key=lambda device: order.index(scene.kind_of[device]))
        for stages in divisors(len(devices)):
            if stages > len(scene.costs.layers):
                continue
            replicas = len(devices) // stages
            groups = [ranked[s * replicas : (s + 1) * replicas] for s in range(stages)]
            bounds = _layers(scene, groups)
            for micro_steps in whole_micro_steps(scene, replicas):
                shares = _samples(scene, groups, bounds, micro_steps)
                layout = Candidate(
                    variant=Variant(stages=stages, tensor_parallel=1, data_parallel=replicas),
                    units=tuple(tuple((device,) for device in group) for group in groups),
                    bounds=bounds,
                    shares=shares,
                    micro_steps=micro_steps,
                )
                if scene.predict(layout) is not None:  # it fits into memory
                    yield layout


def _rate(scene: Scene, device: int) -> float:
    return scene.cluster.devices[device].rate


def _layers(scene: Scene, groups: list[list[int]]) -> tuple[int, ...]:
    """Return bounds by which each group has layers in proportion to its speed."""
    work = [layer.flops for layer in scene.costs.layers]
    speeds = [sum(_rate(scene, device) for device in group) for group in groups]
    if len(groups) == 1:
        return 0, len(work)
    total, bounds, done, place = sum(work), [0], 0.0, 0
    for number, speed in enumerate(speeds[:-1]):
        done += speed / sum(speeds) * total
        most = len(work) - (len(groups) - 1 - number)
        place += 1
        while place < most and abs(sum(work[: place + 1]) - done) <= abs(sum(work[:place]) - done):
            place += 1
        bounds.append(place)
    found = (*bounds, len(work))
    return found if all(a < b for a, b in pairwise(found)) else balanced_cuts(work, len(groups))


def _samples(
    scene: Scene, groups: list[list[int]], bounds: tuple[int, ...], micro_steps: int
) -> tuple[int, ...]:
    """Return the replicas' shares by their speed."""
    work = [sum(layer.flops for layer in scene.costs.layers[a:b]) for a, b in pairwise(bounds)]
    slowest = [
        max(own / _rate(scene, group[replica]) for own, group in zip(work, groups, strict=True))
        for replica in range(len(groups[0]))
    ]
    samples = scene.settings.global_batch // micro_steps
    found = balanced_shares(
        samples, lambda r, share: share * slowest[r], [samples] * len(slowest), least=1
    )
    assert found is not None, "each replica has a sample"
    return found


def _cost(scene: Scene, layout: Candidate) -> float:
    """Return the seconds of a step, by the rule's own estimate."""
    variant = layout.variant
    stage_s = [
        max(scene.stage_times(layout, replica)[stage] for replica in range(variant.data_parallel))
        for stage in range(variant.stages)
    ]
    size = scene.costs.boundary_bytes * max(layout.shares)
    sent = 0.0
    for before, after in pairwise(layout.units):
        pairs = zip(before, after, strict=True)
        links = [scene.cluster.link(scene.node(a[0]), scene.node(b[0])) for a, b in pairs]
        sent += 2 * max(size / link.bytes_s for link in links)
    reduced = []
    for stage, row in enumerate(layout.units):
        layers = scene.costs.layers[layout.bounds[stage] : layout.bounds[stage + 1]]
        link = scene.cluster.slowest_link([scene.node(unit[0]) for unit in row])
        weights = 4.0 * sum(layer.parameters for layer in layers)
        reduced.append(ring_s(link, weights, variant.data_parallel))
    return sum(stage_s) + (layout.micro_steps - 1) * max(stage_s) + sent + max(reduced)
