# SPDX-License-Identifier: Apache-2.0
"""From seconds and losses of rounds to the rows and the picture of ``benchmarks losses``."""

import pytest

from benchmarks.losses.measure import build_rows
from benchmarks.losses.request import LossesRequest
from benchmarks.result import result_table

STOCK, MUON, OURS = "deepspeed-1f1b", "deepspeed-1f1b-muon", "wavemare-pipemare-auto"
REQUEST = LossesRequest(rounds=3, steps_per_round=10, adamw_lr=0.5, muon_lr=0.25)
SECONDS = {STOCK: [3.0, 2.0, 2.0], MUON: [4.0, 4.0, 4.0], OURS: [2.0, 1.0, 1.0]}
LOSSES = {STOCK: [5.0, 4.0, 3.0], MUON: [5.0, 2.0, 1.0], OURS: [4.0, 3.5, 3.25]}


@pytest.fixture
def rows():
    return {row["system"]: row for row in build_rows(REQUEST, SECONDS, LOSSES)}


def test_curves_have_steps_seconds_and_losses(rows):
    assert rows[STOCK]["curve"] == [[10, 3.0, 5.0], [20, 5.0, 4.0], [30, 7.0, 3.0]]
    assert (rows[STOCK]["seconds"], rows[STOCK]["eval_loss"], rows[STOCK]["steps"]) == (7, 3, 30)
    assert [rows[name]["rate"] for name in rows] == [0.5, 0.25, 0.25]


def test_speed_is_of_median_rounds_and_time_to_the_loss_of_all(rows):
    assert (rows[STOCK]["median_s"], rows[STOCK]["ratio"]) == (0.2, 1.0)
    assert (rows[OURS]["median_s"], rows[OURS]["ratio"]) == (0.1, 2.0)
    # Between 4 s, loss 5, and 8 s, loss 2.
    assert rows[MUON]["seconds_to_loss"] == pytest.approx(4 + 4 * 2 / 3)
    assert rows[MUON]["sooner"] == pytest.approx(7 / rows[MUON]["seconds_to_loss"])
    assert rows[OURS]["seconds_to_loss"] is rows[OURS]["sooner"] is None


def test_without_the_baseline_there_is_nothing_to_compare_with():
    (row,) = build_rows(REQUEST, {OURS: SECONDS[OURS]}, {OURS: LOSSES[OURS]})
    assert row["ratio"] is row["seconds_to_loss"] is row["sooner"] is None


def test_tables_and_pictures_show_each_system(rows, shown, check_picture):
    result = {"rows": list(rows.values()), "text": "a text", "bigram": 3.7}
    text = shown(result_table(REQUEST, result))
    assert "a text" in text
    assert all(name in text for name in rows)
    check_picture(lambda file: REQUEST.draw(result, file))
