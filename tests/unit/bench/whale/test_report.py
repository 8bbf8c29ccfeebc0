# SPDX-License-Identifier: Apache-2.0
"""Rows, ratios, bounds and errors of ``wavemare bench whale``; its table and picture."""

from dataclasses import asdict

import pytest

from wavemare.bench.whale.report import (
    CutsMeasured,
    SharesMeasured,
    choice_rows,
    cut_rows,
    share_rows,
)
from wavemare.bench.whale.request import ALONE, PASSES, WhaleJob, WhaleRequest
from wavemare.bench.whale.show import draw, result_table
from wavemare.errors import CommError
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.speed import Line

SHARES = WhaleJob(part="shares", ranks=2, devices=(0.9, 0.45))
CUTS = WhaleJob(part="cuts", ranks=2, devices=(0.45, 0.9), micro_batches=8)


def shares(gap=0.0):
    measured = SharesMeasured(
        shares={"equal": (6, 6), "planned": (8, 4)},
        seconds={
            "equal": [[1.0, 2.0], [1.0, 9.0], [1.0, 2.0]],
            "planned": [[1.5, 1.4], [1.5, 1.6], [1.0, 1.25]],
            ALONE: [[1.0, 1.8], [1.0, 2.0], [9.0, 2.1]],
            PASSES: [[1.2, 1.0], [1.1, 1.25], [1.0, 1.3]],
        },
        losses={"equal": [5.0, 4.0, 3.0], "planned": [5.0, 4.0 + gap]},
        predicted_s=1.3,
        speeds=[Line(0.0, 0.1), Line(0.01, 0.2)],
        disturbed=3,
    )
    return share_rows(SHARES, measured)


def cuts(schedule="1f1b", slowness=1.0):
    """Return rows of a pipeline whose first rank takes so many times as long as was measured."""
    job = WhaleJob(**{**asdict(CUTS), "schedule": schedule})
    measured = CutsMeasured(
        cuts={"equal": (0, 3, 6), "planned": (0, 2, 6)},
        table=[[0.2] * 6, [0.1] * 6],
        seconds={"equal": [[5.2, 4.0]], "planned": [[3.7, 3.6]]},
        compute_s={
            "equal": [[0.6 * slowness, 0.3]],
            "planned": [[0.4 * slowness, 0.4], [0.4 * slowness, 0.4], [9.0, 0.1]],
        },
        predicted={"equal": (0.6, 0.3), "planned": (0.4, 0.4)},
    )
    return cut_rows(job, measured)


def test_shares_are_judged_by_the_slowest_rank_and_by_the_speeds_alone():
    equal, planned = shares()
    assert (equal["median_s"], equal["ratio"], equal["ideal"]) == (2.0, 1.0, 1.0)
    assert planned["rounds_s"] == [1.5, 1.6, 1.25]
    assert planned["median_s"] == 1.5
    assert planned["ratio"] == pytest.approx(2 / 1.5)
    assert planned["rho"] == 2.0
    assert planned["ideal"] == 1.5
    assert planned["bound_fraction"] == pytest.approx(2 / 1.5 / 1.5)
    assert planned["speeds"][1] == {"fixed_s": 0.01, "sample_s": 0.2}
    assert planned["disturbed"] == 3
    assert (equal["passes_s"], planned["passes_s"]) == (2.0, 1.25)
    assert (equal["passes_ratio"], planned["passes_ratio"]) == (1.0, 1.6)
    assert (equal["predicted_s"], planned["predicted_s"]) == (None, 1.3)


def test_losses_of_the_same_batches_must_agree():
    assert shares(gap=9e-7)[1]["loss_gap"] == pytest.approx(9e-7)
    with pytest.raises(CommError, match="off by 2e-06"):
        shares(gap=2e-6)
    with pytest.raises(CommError):
        shares(gap=float("nan"))


def test_cuts_are_judged_by_the_best_cut_of_the_measured_table():
    equal, planned = cuts()
    # Equal parts: 8 * 0.6, and the first one has done two forward passes (0.4) when the other one
    # has done its first micro-batch (0.2 + 0.3). The best ones: 0.4 + 0.4 + 7 * 0.4.
    assert planned["ideal"] == pytest.approx(4.9 / 3.6)
    assert planned["fluid"] == pytest.approx(4.9 / 3.6)
    assert planned["ratio"] == pytest.approx(5.2 / 3.7)
    assert planned["best_cuts"] == [0, 2, 6]
    assert planned["predicted_s"] == pytest.approx(3.6)
    assert (planned["slow"], equal["ideal"]) == (0, 1.0)


def test_an_asynchronous_pipeline_gains_more():
    assert cuts("pipemare")[1]["ideal"] == pytest.approx(0.6 / 0.4)


def test_predictions_are_compared_stage_by_stage():
    equal, planned = cuts(slowness=1.25)
    assert planned["stage_s"] == pytest.approx([0.5, 0.4])
    assert [planned["stage_error"], equal["stage_error"]] == pytest.approx([0.2, 0.2])


def test_the_ideal_is_one_of_the_speeds_in_the_rounds():
    planned = cuts(slowness=1.25)[1]
    # 0.25 and 0.1 for each layer: equal parts wait for 0.25 + 0.3 - 0.5, and the best ones are 1:5.
    assert planned["ideal"] == pytest.approx((8 * 0.75 + 0.05) / (0.25 + 0.5 + 7 * 0.5))
    assert planned["ideal_before"] == pytest.approx(4.9 / 3.6)
    assert cuts()[1]["ideal_before"] == pytest.approx(cuts()[1]["ideal"])


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
    trials = [
        {"rounds_s": [2.5, 2.5, 9.0], "disturbed": 0},
        {"rounds_s": [2.4, 2.4, 2.4], "disturbed": 1},
    ]
    return choice_rows(WhaleJob(part="choice", ranks=4, devices=(0.3,) * 4), "like", plans, trials)


def test_the_choice_stands_beside_what_was_fastest():
    chosen, other = choice()
    assert (chosen["system"], chosen["chosen"]) == ("1x1x4", True)
    assert (other["system"], other["chosen"]) == ("4x1x1", False)
    assert chosen["ratio"] == pytest.approx(2.4 / 2.5)
    assert other["ratio"] == 1.0
    assert chosen["error"] == pytest.approx(2.0 / 2.5 - 1)
    assert (chosen["cuts"], other["cuts"]) == (None, [0, 3, 6, 9, 12])
    assert (other["predicted_s"], other["disturbed"]) == (3.0, 1)


def test_the_table_and_the_picture_show_every_row(shown, check_picture):
    rows = shares() + cuts() + choice()
    result = {"throttle": "cgroup v1", "request": asdict(WhaleRequest()), "rows": rows}
    text = shown(result_table(result))
    assert "unlike devices by cgroup v1" in text
    words = "8,4 0,2,6 1.333 1.500 1f1b 103.3% (chosen) 6,6,2,2".split()
    assert all(word in text for word in ("0.90 0.45", *words))
    check_picture(lambda file: draw(result, file))
