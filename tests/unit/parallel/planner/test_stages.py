# SPDX-License-Identifier: Apache-2.0
"""Cuts and orders of unlike stages against full enumeration, and the numbers of the design."""

import random
from itertools import combinations, permutations

import numpy as np
import pytest

from wavemare.parallel.stages import (
    StageProblem,
    best_order,
    cut_stages,
    pipeline_s,
)


def in_flight(stages, micro_steps):
    return tuple(min(micro_steps, stages - stage) for stage in range(stages))


def problem_of(cost, static, kept, devices, micro_steps, stages, hop=0.0):
    """Devices: (speed, memory) of each type."""
    speeds = np.asarray([speed for speed, _ in devices])
    return StageProblem(
        seconds=np.asarray(cost)[None, :] / speeds[:, None],
        static_bytes=np.asarray(static, dtype=float),
        activation_bytes=np.asarray(kept, dtype=float),
        memory_bytes=np.asarray([memory for _, memory in devices], dtype=float),
        hop_s=np.full(len(devices), hop),
        in_flight=in_flight(stages, micro_steps),
    )


def stage_times(bounds, order, cost, static, kept, devices, micro_steps, hop):
    """Return the times of stages by plain sums; None where one does not fit."""
    times, stages = [], len(order)
    for stage, kind in enumerate(order):
        layers = range(bounds[stage], bounds[stage + 1])
        keeps = min(micro_steps, stages - stage) * sum(kept[i] for i in layers)
        speed, memory = devices[kind]
        if sum(static[i] for i in layers) + keeps > memory:
            return None
        times.append(sum(cost[i] for i in layers) / speed + (hop if stage else 0.0))
    return times


def all_cuts(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def draw_problem(seed):
    draw = random.Random(seed)
    layers = draw.randint(4, 9)
    stages = min(draw.randint(2, 4), layers)
    cost = [draw.uniform(0.5, 2) for _ in range(layers)]
    kept = [draw.uniform(0.1, 1) for _ in range(layers)]
    static = [draw.uniform(0.1, 1) for _ in range(layers)]
    devices = [(draw.uniform(0.5, 3), draw.uniform(2, 9)) for _ in range(stages)]
    return cost, static, kept, devices, draw.choice([0.0, 0.2]), stages


def test_cuts_equal_enumeration_for_300_seeds():
    infeasible = 0
    for seed in range(300):
        cost, static, kept, devices, hop, stages = draw_problem(seed)
        order = tuple(range(stages))
        cut = cut_stages(problem_of(cost, static, kept, devices, 8, stages, hop), order)
        slowest = [
            max(times)
            for bounds in all_cuts(len(cost), stages)
            if (times := stage_times(bounds, order, cost, static, kept, devices, 8, hop))
        ]
        assert (cut is None) == (not slowest), seed
        if cut is None:
            infeasible += 1
            continue
        again = stage_times(cut.bounds, order, cost, static, kept, devices, 8, hop)
        assert again == pytest.approx(cut.stage_s, abs=1e-9)
        assert cut.slowest_s == pytest.approx(min(slowest), abs=1e-9), seed
    assert 10 < infeasible < 250


def test_orders_equal_enumeration_for_300_seeds():
    """Over all orders of two types: the slowest stage is the best, the step nearly so."""
    infeasible, excess = 0, []
    for seed in range(300):
        cost, static, kept, devices, hop, stages = draw_problem(seed)
        devices = devices[:2]
        counts = (stages - stages // 2, stages // 2)
        problem = problem_of(cost, static, kept, devices, 8, stages, hop)
        cut = best_order(problem, counts, 8)
        orders = set(permutations([0] * counts[0] + [1] * counts[1]))
        found = [
            times
            for order in orders
            for bounds in all_cuts(len(cost), stages)
            if (times := stage_times(bounds, order, cost, static, kept, devices, 8, hop))
        ]
        assert (cut is None) == (not found), seed
        if cut is None:
            infeasible += 1
            continue
        assert sorted(cut.order) == sorted([0] * counts[0] + [1] * counts[1])
        again = stage_times(cut.bounds, cut.order, cost, static, kept, devices, 8, hop)
        assert again == pytest.approx(cut.stage_s, abs=1e-9)
        # With many micro-batches the slowest stage decides alone.
        bottleneck = best_order(problem, counts, 10**9).slowest_s
        assert bottleneck == pytest.approx(min(map(max, found)), abs=1e-7), seed
        least = min(pipeline_s(times, 8) for times in found)
        excess.append(pipeline_s(cut.stage_s, 8) / least - 1)
        assert excess[-1] >= -1e-9
    assert 10 < infeasible < 250
    assert max(excess) < 0.02
    assert sum(e > 1e-9 for e in excess) < 0.1 * len(excess)


@pytest.mark.parametrize(("micro_steps", "gain"), [(8, 1.206), (32, 1.248)])
def test_golden_cuts_of_2_fast_and_2_slow_devices(micro_steps, gain):
    cost, devices = [1.0] * 24, [(15.7, 32.0), (9.3, 16.0)]
    problem = problem_of(cost, [0.4] * 24, [0.25] * 24, devices, micro_steps, 4)
    cut = cut_stages(problem, (0, 0, 1, 1))
    assert cut.bounds == (0, 8, 16, 20, 24)
    equal = [6 / 15.7, 6 / 15.7, 6 / 9.3, 6 / 9.3]
    found = pipeline_s(equal, micro_steps) / pipeline_s(cut.stage_s, micro_steps)
    assert found == pytest.approx(gain, abs=5e-4)
    best = best_order(problem, (2, 2), micro_steps)
    assert pipeline_s(best.stage_s, micro_steps) <= pipeline_s(cut.stage_s, micro_steps) + 1e-12


def test_impossible_problems():
    problem = problem_of([1.0] * 3, [1.0] * 3, [0.0] * 3, [(1.0, 0.5)], 4, 2)
    assert cut_stages(problem, (0, 0)) is None
    assert best_order(problem, (2,), 4) is None
    assert cut_stages(problem_of([1.0], [0.0], [0.0], [(1.0, 9.0)], 4, 2), (0, 0)) is None
