# SPDX-License-Identifier: Apache-2.0
"""Which devices a layout may leave out, and small changes that make a layout faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from wavemare.parallel.layout.layout import Prediction
from wavemare.parallel.planner.cluster import Cluster
from wavemare.parallel.planner.predict import Candidate, Scene
from wavemare.parallel.planner.proposals import may_cut_apart

_FEW = 16
"""Devices up to which each of them may be left out, and any two be swapped."""
_FEW_NODES = 8
_MOST_SLOW = 4
"""Slow devices that may be left out one by one."""
_POWERS = (1, 2, 4, 8)
_MOST_SLACK = 3
_LEAST_GAIN = 1e-3
_SLACK_GAIN = 0.02
"""Of a step, for which more activations are kept."""
_MOST_TRIALS = 400


def pools(cluster: Cluster, *, leave_out: bool = True) -> Iterator[tuple[int, ...]]:
    """Yield sets of devices that a layout may use, all of them first.

    Left out are slow devices, the slowest first; the devices of a node; and all types or nodes but
    one. Of many devices, only whole types are left out, and nodes where their links are unlike.
    """
    everything = tuple(range(len(cluster.devices)))
    found = {everything: None}
    if leave_out:
        rate = {index: device.rate for index, device in enumerate(cluster.devices)}
        fast = sorted(everything, key=lambda index: (-rate[index], index))
        if len(everything) <= _FEW:
            counts = {*everything[-_MOST_SLOW:], *_POWERS} & {*everything[1:]}
            found |= {tuple(sorted(fast[:count])): None for count in sorted(counts)[::-1]}
        for kind in sorted(set(rate.values()))[1:]:
            found[tuple(index for index in everything if rate[index] >= kind)] = None
        nodes = dict.fromkeys(device.node for device in cluster.devices)
        unlike = any(first != second for first, second in cluster.pairs)
        if 1 < len(nodes) <= _FEW_NODES and (unlike or len(everything) <= _FEW):
            for name in nodes:
                inside = [device.node == name for device in cluster.devices]
                found[tuple(i for i in everything if inside[i])] = None
                found[tuple(i for i in everything if not inside[i])] = None
    yield from found


def refined(
    scene: Scene, candidate: Candidate, predicted: Prediction
) -> tuple[Candidate, Prediction]:
    """Return a layout to which no small change makes a difference any more.

    A bound moves by a layer, a sample moves to another replica, two devices of one type on two
    nodes swap their places, or stages run further ahead.
    """
    trials = 0
    while trials < _MOST_TRIALS:
        best = None
        for other in _neighbours(scene, candidate):
            trials += 1
            found = scene.predict(other)
            more = other.variant.slack > candidate.variant.slack
            limit_s = predicted.step_s * (1 - (_SLACK_GAIN if more else 0))
            if found is not None and found.step_s < min(
                limit_s, best[1].step_s if best else limit_s
            ):
                best = other, found
        if best is None or best[1].step_s > predicted.step_s * (1 - _LEAST_GAIN):
            break
        candidate, predicted = best
    return candidate, predicted


def _neighbours(scene: Scene, layout: Candidate) -> Iterator[Candidate]:
    variant = layout.variant
    if variant.stages > 1:
        if variant.slack < (_MOST_SLACK if variant.drains else 1):
            yield replace(layout, variant=replace(variant, slack=variant.slack + 1))
        if variant.slack:
            yield replace(layout, variant=replace(variant, slack=variant.slack - 1))
        yield from _other_cuts(scene, layout)
    if len(scene.cluster.devices) > _FEW:
        return
    if variant.data_parallel > 1 and variant.experts == 1:
        for more, less in combinations(range(variant.data_parallel), 2):
            for one, two in ((more, less), (less, more)):
                shares = list(layout.shares)
                shares[one], shares[two] = shares[one] + 1, shares[two] - 1
                if shares[two]:
                    yield replace(layout, shares=tuple(shares))
    yield from _swaps(scene, layout)


def _other_cuts(scene: Scene, layout: Candidate) -> Iterator[Candidate]:
    cuts, apart = layout.cuts, may_cut_apart(scene, layout.variant)
    rows = [[replica] for replica in range(len(cuts))] if apart else []
    if layout.own_bounds is None:
        rows.append(list(range(len(cuts))))
    for row in rows:
        for place in range(1, layout.variant.stages):
            for step in (-1, 1):
                changed = [list(bounds) for bounds in cuts]
                for replica in row:
                    changed[replica][place] += step
                if all(a < b for bounds in changed for a, b in pairwise(bounds)):
                    yield layout.cut(tuple(map(tuple, changed)))


def _swaps(scene: Scene, layout: Candidate) -> Iterator[Candidate]:
    """Yield layouts in which two units of one type change places, if that changes links."""
    places = [(s, r) for s, row in enumerate(layout.units) for r in range(len(row))]
    for (s, r), (t, q) in combinations(places, 2):
        one, two = layout.units[s][r], layout.units[t][q]
        if scene.kind_of[one[0]] != scene.kind_of[two[0]] or scene.node(one[0]) == scene.node(
            two[0]
        ):
            continue
        grid = [list(row) for row in layout.units]
        grid[s][r], grid[t][q] = two, one
        yield replace(layout, units=tuple(map(tuple, grid)))
