# SPDX-License-Identifier: Apache-2.0
"""What shares and cuts can gain, beside closed forms and a slow search; plans to choose from."""

from itertools import product

import numpy as np
import pytest

from benchmarks.planner.run import best_cut, cut_step_s, share_gain


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
