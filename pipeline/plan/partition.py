# SPDX-License-Identifier: Apache-2.0
"""Where a chain of layers is cut into stages: pure arithmetic on the layers' weights."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

from wavemare.errors import ConfigError, did_you_mean

STAGES_KEY = "wavemare.pipeline.stages"
PARTITION_KEY = "wavemare.pipeline.partition"
_NAMES = ("parameters", "compute", "time", "uniform")
_TOLERANCE = 1.01
"""Of the heaviest rank's weight, where a heavier one makes stages more even."""
_Cost = Callable[[tuple[int, ...]], tuple[float, float]]


def check_partition(partition: str) -> None:
    """Check that there is a partition of that name.

    Raises:
        ConfigError: There is none.
    """
    if partition not in _NAMES:
        remedy = did_you_mean(partition, _NAMES)
        raise ConfigError(PARTITION_KEY, partition, "there is no such partition", remedy)


def balanced_cuts(
    weights: Sequence[float], num_stages: int, homes: Sequence[int] = ()
) -> tuple[int, ...]:
    """Cut a chain so that the heaviest stage is as light as possible.

    Among the cuts with the lightest heaviest stage, the one with the smallest sum of squared stage
    weights is taken (it evens out the other stages), and among these the one whose first bounds are
    smallest, so that every process finds the same cut.

    Where ranks have several stages, the heaviest rank is made light, and of the cuts within 1 % of
    it the one with the smallest sum of squared stage weights is taken. The search for it missed
    the optimum of 2 in 1,000 small cases.

    Args:
        weights: Cost of each layer, in any unit; finite and not negative.
        num_stages: Number of stages, each of which gets at least one layer.
        homes: For each stage its rank, where ranks have several.

    Returns:
        ``num_stages + 1`` bounds: stage ``s`` holds the layers ``[bounds[s], bounds[s + 1])``.

    Raises:
        ConfigError: There are fewer layers than stages.
    """
    if num_stages > len(weights):
        raise ConfigError(
            STAGES_KEY,
            len(set(homes)) or num_stages,
            f"the model has only {len(weights)} layers for {num_stages} stages",
            f"Use at most {len(weights)} stages",
        )
    totals = [0.0, *accumulate(float(weight) for weight in weights)]
    heaviest = _lightest_heaviest_stage(totals, num_stages)
    cuts = _evenest_cuts(totals, num_stages, heaviest)
    if len(set(homes)) == len(homes):
        return cuts
    cuts = _search(cuts, partial(_cost, totals, homes, 0.0))
    limit = _TOLERANCE * _cost(totals, homes, 0.0, cuts)[0]
    return _search(cuts, partial(_cost, totals, homes, limit))


def explicit_cuts(bounds: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Check cuts that a user wrote.

    Args:
        bounds: The first layer of each stage, or the same with the number of layers appended.
        num_layers: Length of the chain.
        num_stages: Number of stages wanted.

    Returns:
        ``num_stages + 1`` bounds, from 0 to ``num_layers``.

    Raises:
        ConfigError: The bounds do not start at 0, do not increase, leave the chain or do not make
            the wanted number of stages.
    """
    given = list(bounds)

    def refuse(reason: str) -> ConfigError:
        remedy = (
            f"Give the first layer of each of the {num_stages} stages, increasing from 0 "
            f"and below {num_layers}"
        )
        return ConfigError(PARTITION_KEY, given, reason, remedy)

    if not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in given):
        raise refuse("a bound is not an integer")
    complete = given if given and given[-1] == num_layers else [*given, num_layers]
    if complete[0] != 0:
        raise refuse("the first stage does not start at layer 0")
    if any(right <= left for left, right in pairwise(complete)):
        raise refuse("the bounds do not increase strictly, so a stage would be empty")
    if len(complete) != num_stages + 1:
        raise refuse(f"this makes {len(complete) - 1} stages instead of {num_stages}")
    return tuple(complete)


def cuts_of_replicas(
    bounds: Sequence[Sequence[int]], num_layers: int, num_stages: int, replicas: int
) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    """Check cuts that a user wrote for each replica.

    Args:
        bounds: For each replica what `explicit_cuts` takes.
        num_layers: Length of the chain.
        num_stages: Number of stages of every replica.
        replicas: Their number.

    Returns:
        The bounds of each replica; only once where all have the same.

    Raises:
        ConfigError: There are cuts for another number of replicas, or one cannot be.
    """
    if len(bounds) != replicas:
        reason = f"these are the cuts of {len(bounds)} replicas, and there are {replicas}"
        raise ConfigError(PARTITION_KEY, list(bounds), reason, f"Give {replicas} lists, or one")
    found = tuple(explicit_cuts(own, num_layers, num_stages) for own in bounds)
    return found[0] if len(set(found)) == 1 else found


def segments(cuts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of layers that no replica cuts.

    Args:
        cuts: The bounds of each replica's stages.
    """
    return list(pairwise(sorted({bound for bounds in cuts for bound in bounds})))


def _lightest_heaviest_stage(totals: list[float], num_stages: int) -> float:
    # best[j]: weight of the heaviest stage when the first j layers form the stages so far.
    best = [0.0] + [math.inf] * (len(totals) - 1)
    for stage in range(1, num_stages + 1):
        best = [
            min(
                (max(best[i], totals[j] - totals[i]) for i in range(stage - 1, j)),
                default=math.inf,
            )
            for j in range(len(totals))
        ]
    return best[-1]


def _evenest_cuts(totals: list[float], num_stages: int, heaviest: float) -> tuple[int, ...]:
    # rest[i]: least sum of squares of the layers from i on, in the stages that are left. Going
    # backwards lets the reconstruction prefer the smallest bound at each step.
    num_layers = len(totals) - 1
    rest = [math.inf] * num_layers + [0.0]
    choices: list[list[int]] = []
    for left in range(1, num_stages + 1):
        choice = [num_layers] * (num_layers + 1)
        costs = [math.inf] * (num_layers + 1)
        for i in range(num_layers - left + 1):
            for j in range(i + 1, num_layers - left + 2):
                weight = totals[j] - totals[i]
                if weight <= heaviest and weight * weight + rest[j] < costs[i]:
                    costs[i] = weight * weight + rest[j]
                    choice[i] = j
        rest = costs
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(bounds)


def _cost(
    totals: Sequence[float], homes: Sequence[int], limit: float, bounds: tuple[int, ...]
) -> tuple[float, float]:
    """Return the heaviest rank's weight, or a limit above it, and how uneven the cut is.

    Without a limit ranks should be even, else stages.
    """
    stages = [totals[end] - totals[start] for start, end in pairwise(bounds)]
    ranks = [0.0] * (max(homes) + 1)
    for rank, weight in zip(homes, stages, strict=True):
        ranks[rank] += weight
    return max(limit, *ranks), sum(weight * weight for weight in (stages if limit else ranks))


def _search(bounds: tuple[int, ...], cost: _Cost) -> tuple[int, ...]:
    """Move layers while that lowers the cost, again from kicked cuts; the same on all processes."""
    generator = random.Random(0)
    best = _descend(bounds, cost)
    for _ in range(2500 // len(bounds) ** 2):
        kicked = best
        for _ in range(4):
            kicked = generator.choice([*_moves(kicked)] or [kicked])
        best = min(best, _descend(kicked, cost), key=cost)
    return best


def _descend(bounds: tuple[int, ...], cost: _Cost) -> tuple[int, ...]:
    while True:
        moved = min(_moves(bounds), default=bounds, key=cost)
        if cost(moved) >= cost(bounds):
            return bounds
        bounds = moved


def _moves(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts in which one stage has a layer more, and another one less."""
    for first in range(1, len(bounds) - 1):
        for last in range(first, len(bounds) - 1):
            before, moving, after = bounds[:first], bounds[first : last + 1], bounds[last + 1 :]
            if moving[-1] + 1 < after[0]:
                yield (*before, *(bound + 1 for bound in moving), *after)
            if before[-1] < moving[0] - 1:
                yield (*before, *(bound - 1 for bound in moving), *after)
