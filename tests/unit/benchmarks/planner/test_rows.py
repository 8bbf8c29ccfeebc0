# SPDX-License-Identifier: Apache-2.0
"""Rows, ratios, bounds and errors of ``benchmarks planner``; its table and picture."""

import pytest

from benchmarks.planner.request import PlannerJob
from benchmarks.planner.run import choice_rows, cut_rows, share_rows
from support.refusals import refuses
from wavemare.errors import CommError
from wavemare.parallel.layout.layout import Layout, Prediction


def shares(gap=0.0):
    return share_rows(
        PlannerJob(part="shares", ranks=2, devices=(0.9, 0.45)),
        {"equal": (6, 6), "planned": (8, 4)},
        {
            "equal": [[1.0, 2.0], [1.0, 9.0], [1.0, 2.0]],
            "planned": [[1.5, 1.4], [1.5, 1.6], [1.0, 1.25]],
        },
        {"equal": [5.0, 4.0], "planned": [5.0, 4.0 + gap]},
        alone_s=[1.0, 2.0],
        predicted_s=1.3,
    )


def cuts(schedule="1f1b", slowness=1.0):
    """Return rows of a pipeline whose first rank is so many times slower than its table."""
    return cut_rows(
        PlannerJob(part="cuts", ranks=2, devices=(0.45, 0.9), schedule=schedule),
        {"equal": (0, 3, 6), "planned": (0, 2, 6)},
        {"equal": [[5.2, 4.0]], "planned": [[3.7, 3.6]]},
        {"equal": [0.6 * slowness, 0.3], "planned": [0.4 * slowness, 0.4]},
        table=[[0.2] * 6, [0.1] * 6],
    )


def test_shares_are_compared_by_the_slowest_rank_and_with_the_speeds_alone():
    equal, planned = shares()
    assert (equal["median_s"], equal["ratio"], equal["ideal"]) == (2.0, 1.0, 1.0)
    assert planned["rounds_s"] == [1.5, 1.6, 1.25]
    assert planned["median_s"] == 1.5
    assert planned["ratio"] == pytest.approx(2 / 1.5)
    assert planned["ideal"] == 1.5
    assert planned["bound_fraction"] == pytest.approx(2 / 1.5 / 1.5)
    assert (equal["predicted_s"], planned["predicted_s"]) == (None, 1.3)


def test_losses_of_the_same_batches_must_agree():
    assert shares(gap=9e-7)[1]["loss_gap"] == pytest.approx(9e-7)
    with refuses(CommError, "system", "planned"):
        shares(gap=2e-6)
    with pytest.raises(CommError):
        shares(gap=float("nan"))


def test_cuts_are_compared_with_the_best_cut_of_the_measured_table():
    equal, planned = cuts()
    # Equal parts: 8 * 0.6, and the first one has done two forward passes (0.4) when the other one
    # has done its first micro-batch (0.2 + 0.3). The best ones: 0.4 + 0.4 + 7 * 0.4.
    assert planned["ideal"] == pytest.approx(4.9 / 3.6)
    assert planned["ratio"] == pytest.approx(5.2 / 3.7)
    assert planned["best_cuts"] == [0, 2, 6]
    assert planned["predicted_s"] == pytest.approx(3.6)
    assert (planned["slow"], equal["ideal"]) == (0, 1.0)
    assert cuts("pipemare")[1]["ideal"] == pytest.approx(0.6 / 0.4)


def test_predictions_are_compared_stage_by_stage():
    equal, planned = cuts(slowness=1.25)
    assert planned["stage_s"] == pytest.approx([0.5, 0.4])
    assert [planned["stage_error"], equal["stage_error"]] == pytest.approx([0.2, 0.2])


def choice():
    def plan(step_s, **axes):
        predicted = Prediction(
            step_s=step_s, tokens_per_s=1.0, stage_s=(), rank_s=(), memory_bytes=()
        )
        return Layout(global_batch=16, predicted=predicted, **axes)

    plans = [
        plan(2.0, data_parallel=4, shares=(6, 6, 2, 2)),
        plan(3.0, stages=4, cuts=(0, 3, 6, 9, 12), num_layers=12, shares=(16,)),
    ]
    job = PlannerJob(part="probe", ranks=4, devices=(0.3,) * 4)
    return choice_rows(job, "like", plans, [[2.5, 2.5, 9.0], [2.4, 2.4, 2.4]])


def test_the_choice_stands_beside_the_fastest():
    chosen, other = choice()
    assert (chosen["system"], chosen["chosen"]) == ("1x1x4", True)
    assert (other["system"], other["chosen"]) == ("4x1x1", False)
    assert chosen["ratio"] == pytest.approx(2.4 / 2.5)
    assert other["ratio"] == 1.0
    assert chosen["error"] == pytest.approx(2.0 / 2.5 - 1)
    assert (chosen["cuts"], other["cuts"]) == (None, [0, 3, 6, 9, 12])
