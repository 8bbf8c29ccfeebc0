# SPDX-License-Identifier: Apache-2.0
"""Cuts of a chain into stages, against brute force over all cuts."""

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import ConfigError
from wavemare.pipeline.plan.orders import loop, vee
from wavemare.pipeline.plan.partition import balanced_cuts, explicit_cuts

# Multiples of 1/8 are summed exactly, so that ties are ties for both sides.
weight_lists = st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=1, max_size=9)


def stage_weights(weights, bounds):
    return [sum(weights[left:right]) for left, right in pairwise(bounds)]


def best_by_brute_force(weights, num_stages):
    candidates = [
        (0, *inner, len(weights)) for inner in combinations(range(1, len(weights)), num_stages - 1)
    ]

    def cost(bounds):
        stages = stage_weights(weights, bounds)
        return max(stages), sum(weight * weight for weight in stages), bounds

    return min(candidates, key=cost)


@given(weights=weight_lists, data=st.data())
def test_balanced_cuts_are_the_best_of_all_cuts(weights, data):
    num_stages = data.draw(st.integers(1, len(weights)))
    assert balanced_cuts(weights, num_stages) == best_by_brute_force(weights, num_stages)


@pytest.mark.parametrize("homes", [vee(2), vee(3), loop(2, 2), loop(3, 2), (0, 1, 0)])
def test_ranks_with_several_stages_are_balanced_first(homes):
    generator = random.Random(0)

    def heaviest(bounds):
        ranks = dict.fromkeys(homes, 0.0)
        for rank, weight in zip(homes, stage_weights(weights, bounds), strict=True):
            ranks[rank] += weight
        return max(ranks.values())

    def squares(bounds):
        return sum(weight * weight for weight in stage_weights(weights, bounds))

    for _ in range(12):  # it misses 2 of 1,000 such cases
        count = generator.randint(len(homes), 10)
        weights = [generator.randint(0, 40) / 8 for _ in range(count)]
        inner = combinations(range(1, count), len(homes) - 1)
        candidates = [(0, *bounds, count) for bounds in inner]
        limit = 1.01 * min(map(heaviest, candidates))
        found = balanced_cuts(weights, len(homes), homes)
        assert heaviest(found) <= limit
        assert squares(found) == min(squares(b) for b in candidates if heaviest(b) <= limit)


def test_a_v_has_head_and_embedding_on_one_rank():
    cuts = balanced_cuts([4, *[1] * 12, 4], 4, vee(2))
    assert stage_weights([4, *[1] * 12, 4], cuts) == [5, 5, 5, 5]
    cuts = balanced_cuts([6, *[1] * 12, 6], 4, vee(2))
    assert stage_weights([6, *[1] * 12, 6], cuts) == [6, 6, 6, 6]
    cuts = balanced_cuts([9, *[1] * 12, 1], 6, vee(3))
    assert stage_weights([9, *[1] * 12, 1], cuts) == [9, 3, 3, 3, 3, 1]


@given(weights=st.lists(st.floats(0, 1e12), min_size=1, max_size=30), data=st.data())
def test_any_weights_give_non_empty_stages(weights, data):
    num_stages = data.draw(st.integers(1, len(weights)))
    bounds = balanced_cuts(weights, num_stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert len(bounds) == num_stages + 1
    assert all(left < right for left, right in pairwise(bounds))


def test_more_stages_than_layers_are_refused():
    with refuses(ConfigError, "wavemare.pipeline.stages", 4):
        balanced_cuts([1, 1, 1], 4)


def test_explicit_cuts_are_stage_starts_or_bounds():
    assert explicit_cuts([0, 2, 3], 5, 3) == (0, 2, 3, 5)
    assert explicit_cuts([0, 2, 3, 5], 5, 3) == (0, 2, 3, 5)
    assert explicit_cuts([0], 5, 1) == (0, 5)


@pytest.mark.parametrize(
    "bounds", [[], [1, 3], [0, 3, 2], [0, 2, 2], [0, 6], [0, 1, 2], [0, 1.5], [False, True]]
)
def test_wrong_explicit_cuts_are_refused(bounds):
    with refuses(ConfigError, "wavemare.pipeline.partition", bounds):
        explicit_cuts(bounds, 5, 2)
