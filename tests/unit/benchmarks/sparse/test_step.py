# SPDX-License-Identifier: Apache-2.0
"""Batches, rows and ratios of ``benchmarks sparse --step``; the table and the picture."""

import pytest
import torch

from benchmarks.sparse.request import STEP_BASELINE as BASELINE
from benchmarks.sparse.request import STEP_BOUND as BOUND
from benchmarks.sparse.request import SparseRequest
from benchmarks.sparse.step import StepSample, build_step_result, words_of_step

REQUEST = SparseRequest(step=True, ranks=2, mbit=8.0)
FIGURES = {
    "sparse_bytes_up": 1000.0,
    "sparse_density": 0.25,
    "sparse_union": 0.5,
    "sparse_calls_ordered": 2.0,
    "sparse_calls_allgather": 1.0,
}


def rounds(*seconds, link=None, **figures):
    return [StepSample(s, 1.0 + s, link, figures) for s in seconds]


def times(bound=1.0, *, with_bound=True):
    samples = {
        BASELINE: rounds(5.0, 90.0, 4.0, link=100.0),
        "wavemare-auto": rounds(2.0, 1.0, 3.0, link=10.0, **FIGURES),
        BOUND: rounds(bound, bound, bound),
    }
    if not with_bound:
        del samples[BOUND]
    return build_step_result(REQUEST, samples)


def rows(of):
    return {row["system"]: row for row in of["rows"]}


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


def test_words_are_as_frequent_as_in_a_language():
    ids = torch.cat([words_of_step(REQUEST, s, 0)["input_ids"].flatten() for s in range(100)])
    counts = ids.bincount(minlength=30_522).sort(descending=True).values
    # By Zipf's law, the first word makes 1 / (ln 30,522 + 0.58).
    assert counts[0] / len(ids) == pytest.approx(1 / 10.9, rel=0.1)
    assert ids.max() < 30_522
    # A small batch has few of the words: its gradient is sparse.
    assert words_of_step(REQUEST, 0, 0)["input_ids"].unique().numel() < 0.02 * 30_522
