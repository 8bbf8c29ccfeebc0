# SPDX-License-Identifier: Apache-2.0
"""What shares and cuts can gain, beside closed forms and a slow search; plans to choose from."""

from itertools import product

import numpy as np
import pytest

from wavemare.bench.planner.rows import best_cut, cut_step_s, share_gain
from wavemare.bench.planner.run import layouts_by_axes
from wavemare.parallel.planner import plan
from wavemare.parallel.planner.cluster import Cluster, Device, Link
from wavemare.parallel.planner.model import model_costs
from wavemare.parallel.planner.predict import Settings


@pytest.mark.parametrize("rho", [1.0, 1.5, 15.7 / 9.3, 2.0])
@pytest.mark.parametrize("half", [1, 2, 8])
def test_two_types_in_equal_numbers_gain_the_mean_of_their_speeds(rho, half):
    seconds = [1.0] * half + [rho] * half
    assert share_gain(seconds) == pytest.approx((1 + rho) / 2)
    assert share_gain([1.0, 2.0, 1.0, 1.0]) == pytest.approx(3.5 / 2)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_fills_and_empties_unless_it_is_asynchronous(stages):
    like = [3.0] * stages
    assert cut_step_s(like, 8, "1f1b") == pytest.approx((8 + stages - 1) * 3)
    assert cut_step_s(like, 8, "pipemare") == 8 * 3
    slow_last = [1.0] * (stages - 1) + [3.0]
    assert cut_step_s(slow_last, 8, "1f1b") == pytest.approx(sum(slow_last) + 7 * 3)


def test_a_slow_first_stage_works_while_the_others_fill():
    assert cut_step_s([3.0, 1.0], 8, "1f1b") == pytest.approx(8 * 3)
    assert 8 * 3 < cut_step_s([3.0, 2.0, 2.0, 2.0], 8, "1f1b") < 9 + 7 * 3


@pytest.mark.parametrize("schedule", ["1f1b", "pipemare"])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_cut_is_that_of_a_slow_search(schedule, seed):
    table = np.random.default_rng(seed).uniform(0.5, 2.0, size=(3, 7)).tolist()
    best = np.inf
    for places in product(range(3), repeat=7):  # the stage of each layer
        if list(places) == sorted(places) and set(places) == {0, 1, 2}:
            stage_s = [
                sum(row[layer] for layer in range(7) if places[layer] == stage)
                for stage, row in enumerate(table)
            ]
            best = min(best, cut_step_s(stage_s, 4, schedule))
    bounds, step_s = best_cut(table, 4, schedule)
    assert step_s == pytest.approx(best)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 7, 4)


ALL = {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}


def costs():
    sizes = {"n_embd": 256, "n_layer": 8, "n_head": 4, "n_positions": 128, "vocab_size": 32}
    return model_costs({"model_type": "gpt2", **sizes}, 128, head="GPT2LMHeadModel")


def cluster(*speeds, nodes="0000"):
    devices = tuple(
        Device(type=f"x{speed:g}", tflops=speed / 100, memory_gib=4, memory_gb_s=4, node=node)
        for speed, node in zip(speeds, nodes, strict=True)
    )
    return Cluster(devices=devices, within=Link(1e-4, 1e9), between=Link(1e-3, 25e6))


@pytest.mark.parametrize(
    ("devices", "legal"),
    [
        (cluster(1, 1, 1, 1), ALL),
        # Ranks that share a layer are alike, and in one node.
        (cluster(2, 2, 1, 1), ALL - {(1, 4, 1)}),
        (cluster(1, 1, 1, 1, nodes="0011"), ALL - {(1, 4, 1)}),
    ],
)
def test_there_is_a_plan_for_all_legal_axes_and_the_first_is_the_planners(devices, legal):
    options = {"zero_stages": (0, 1), "recompute": False}
    plans = layouts_by_axes(costs(), devices, Settings(global_batch=16, **options))
    assert set(plans) == legal
    steps = [found.predicted.step_s for found in plans.values() if found.predicted]
    assert steps == sorted(steps)
    for (stages, splits, replicas), found in plans.items():
        axes = found.stages, found.tensor_parallel, found.data_parallel
        assert axes == (stages, splits, replicas)
        assert sum(found.shares) * found.micro_steps == 16
    searched = plan(costs(), devices, global_batch=16, sequence_length=128, **options).best
    assert searched.predicted is not None
    assert searched.predicted.step_s == pytest.approx(steps[0])
