# SPDX-License-Identifier: Apache-2.0
"""Rows, ratios and gaps of ``wavemare bench training``; the tables and the pictures."""

import pytest

from wavemare.bench.training.quality import Curve, learning_rate
from wavemare.bench.training.report import Sample, build_quality, build_result
from wavemare.bench.training.request import BASELINE, BOUND, TrainingRequest
from wavemare.bench.training.show import draw, result_table

FIGURES = {
    "sparse_bytes_up": 1000.0,
    "sparse_density": 0.25,
    "sparse_union": 0.5,
    "sparse_calls_ordered": 2.0,
    "sparse_calls_allgather": 1.0,
}


def rounds(*seconds, link=None, **figures):
    return [Sample(s, 1.0 + s, link, figures) for s in seconds]


def times(bound=1.0, *, with_bound=True):
    samples = {
        BASELINE: rounds(5.0, 90.0, 4.0, link=100.0),
        "wavemare-auto": rounds(2.0, 1.0, 3.0, link=10.0, **FIGURES),
        BOUND: rounds(bound, bound, bound),
    }
    if not with_bound:
        del samples[BOUND]
    return build_result(TrainingRequest(mbit=8.0), samples, task_name="some texts")


def rows(of):
    return {row["system"]: row for row in of["rows"]}


def quality():
    curves = {
        BASELINE: Curve([1.0, 0.5], [(0, 2.0), (2, 0.5)]),
        "wavemare-auto": Curve([1.0, 0.5], [(0, 2.0), (2, 0.5)], 2**20),
        "torch-ddp": Curve([1.0, 0.5], [(0, 2.0), (2, 0.495)]),
        "wavemare-topk": Curve([1.0, 0.75], [(0, 2.0), (2, 0.5)], 2**18),
    }
    request = TrainingRequest(quality_steps=2, systems=tuple(curves))
    return build_quality(request, curves, task_name="some texts")


def test_ratios_and_communication_are_of_medians():
    found = rows(times())
    dense, ours, bound = found[BASELINE], found["wavemare-auto"], found[BOUND]
    assert (dense["median_s"], dense["ratio"], ours["ratio"], bound["ratio"]) == (5, 1, 2.5, 5)
    assert ours["rounds_s"] == [2.0, 1.0, 3.0]
    # What a step takes beyond the bound.
    assert (dense["communication_s"], ours["communication_s"]) == (4.0, 1.0)
    assert ours["communication_ratio"] == 4.0
    assert bound["communication_s"] is None


def test_no_ratio_is_made_of_noise_or_without_the_bound():
    noisy = rows(times(bound=2.5))["wavemare-auto"]
    assert (noisy["communication_s"], noisy["communication_ratio"]) == (0.0, None)
    alone = rows(times(with_bound=False))["wavemare-auto"]
    assert (alone["communication_s"], alone["communication_ratio"]) == (None, None)
    assert alone["ratio"] == 2.5


def test_the_row_has_the_figures_of_the_collectives():
    row = rows(times())["wavemare-auto"]
    assert row["executor"] == "allgather+ordered"
    assert (row["bytes_up"], row["link_bytes_up"]) == (1000, 10.0)
    assert (row["density"], row["union"]) == (0.25, 0.5)
    stock = rows(times())[BASELINE]
    assert (stock["executor"], stock["bytes_up"], stock["link_bytes_up"]) == (None, None, 100.0)


def test_gaps_are_of_the_last_held_out_losses():
    found = {row["system"]: row for row in quality()["quality"]}
    assert found["torch-ddp"]["gap_percent"] == pytest.approx(-1.0)
    assert found["wavemare-topk"]["gap_percent"] == 0.0
    same = {name for name, row in found.items() if row["same_losses"]}
    assert same == {BASELINE, "wavemare-auto"}


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 20, 1.0) for step in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 18)
    assert learning_rate(0, 1, 1.0) == 1.0


@pytest.mark.parametrize("result", [times(), times(with_bound=False), quality()])
def test_tables_and_pictures_show_each_system(result, shown, check_picture):
    text = shown(result_table(result))
    assert "2 ranks over" in text
    for row in result.get("rows", result.get("quality")):
        assert row["system"] in text
    check_picture(lambda file: draw(result, file))
