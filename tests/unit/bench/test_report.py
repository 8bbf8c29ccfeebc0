# SPDX-License-Identifier: Apache-2.0
"""From samples to rows and the table of ``wavemare bench pipeline``: numbers worked out by hand."""

import pytest

from wavemare.bench.recorder import Busy
from wavemare.bench.report import Sample, build_rows, skipped, step_medians
from wavemare.bench.request import PipelineRequest
from wavemare.bench.table import result_table, skipped_lines, with_ends

STOCK, OURS, BOUND = "deepspeed-1f1b", "wavemare-pipemare", "no-communication-bound"


def rounds(*slow):
    """Rounds of two ranks, the second of which is the slower one."""
    return [[Sample(seconds - 0.5), Sample(seconds)] for seconds in slow]


def test_the_median_is_that_of_the_slowest_ranks():
    samples = {(STOCK, 1): [[Sample(1.0), Sample(4.0)], [Sample(9.0), Sample(2.0)], rounds(5.0)[0]]}
    assert step_medians(samples) == {(STOCK, 1): 5.0}


def test_rows_are_ordered_and_compared_at_equal_micro_batches():
    request = PipelineRequest(micro_batches=(2, 1), systems=(BOUND, OURS, STOCK))
    samples = {
        (OURS, 1): rounds(2.0, 2.5, 30.0),
        (BOUND, 1): rounds(2.0, 2.0, 2.0),
        (STOCK, 1): rounds(5.0, 5.0, 4.0),
        (STOCK, 2): rounds(6.0, 6.0, 6.0),
        (OURS, 2): rounds(4.0, 4.0, 4.0),
    }
    rows = build_rows(request, samples)
    keys = [(row["micro_batches"], row["system"]) for row in rows]
    assert keys == [(2, STOCK), (2, OURS), (1, STOCK), (1, OURS), (1, BOUND)]
    by_key = {(row["system"], row["micro_batches"]): row for row in rows}
    ours = by_key[OURS, 1]
    assert (ours["median_s"], ours["ratio"], ours["ideal"]) == (2.5, 2.0, 2.0)
    assert ours["bound_fraction"] == pytest.approx(0.8)
    assert ours["rounds_s"] == [2.0, 2.5, 30.0]
    assert (ours["stages"], ours["steps_per_round"]) == (2, 8)
    assert (by_key[BOUND, 1]["bound_fraction"], by_key[BOUND, 1]["ratio"]) == (1.0, 2.5)
    two = by_key[OURS, 2]
    assert (two["ratio"], two["ideal"], two["bound_fraction"]) == (1.5, 1.5, None)
    assert by_key[STOCK, 2]["ideal"] == 1.0
    assert "utilisation" not in ours


def test_without_the_baseline_there_is_no_ratio():
    request = PipelineRequest(micro_batches=(8,), systems=("torch-zbv",))
    (row,) = build_rows(request, {("torch-zbv", 8): rounds(1.0)})
    assert (row["ratio"], row["ideal"], row["waiting"], row["ranks"]) == (None, None, None, None)


def test_waiting_is_that_of_the_busiest_rank():
    idle = Sample(10.0, Busy(compute_s=2.0, step_s=1.0, message_s=6.0))
    busy = Sample(10.0, Busy(compute_s=5.0, step_s=3.0, message_s=1.0))
    slow = Sample(20.0, Busy(compute_s=5.0, step_s=3.0, message_s=1.0))
    request = PipelineRequest(micro_batches=(1,), systems=(STOCK,))
    samples = {(STOCK, 1): [[idle, busy], [idle, slow], [idle, busy]]}
    (row,) = build_rows(request, samples)
    assert row["waiting"] == pytest.approx(0.2)
    assert row["ranks"][0]["waiting_s"] == pytest.approx(7.0)
    assert row["ranks"][1] == {
        "seconds": 10.0,
        "waiting_s": pytest.approx(2.0),
        "compute_s": 5.0,
        "step_s": 3.0,
        "message_s": 1.0,
    }


def test_utilisation_is_the_nominal_work_over_the_measured_time():
    request = PipelineRequest(
        stages=4, micro_batches=(4,), systems=(STOCK, OURS), forward_ms=7.0, backward_ms=13.0
    )
    samples = {(STOCK, 4): rounds(0.16), (OURS, 4): rounds(0.1)}
    stock, ours = build_rows(request, samples)
    assert stock["utilisation"] == pytest.approx(0.5)
    assert stock["ideal_utilisation"] == pytest.approx(4 / 7)
    assert ours["utilisation"] == pytest.approx(0.8)
    assert ours["ideal_utilisation"] == 1.0


def test_skipped_systems_have_a_reason():
    request = PipelineRequest(micro_batches=(1, 2, 4), systems=("torch-1f1b", STOCK))
    (entry,) = skipped(request)
    assert (entry["system"], entry["stages"], entry["micro_batches"]) == ("torch-1f1b", 2, 1)
    assert "at least 2 micro-batches" in entry["reason"]
    (line,) = skipped_lines({"skipped": [entry]})
    assert line == f"torch-1f1b at M=1 is left out: {entry['reason']}"


ROW = {
    "system": BOUND,
    "stages": 2,
    "micro_batches": 1,
    "median_s": 0.0123,
    "ratio": 1.5,
    "ideal": None,
    "bound_fraction": None,
    "waiting": 0.031,
}


def test_full_rows_fit_a_narrow_screen(shown):
    full = {**ROW, "median_s": 1.2345, "ideal": 2.0, "bound_fraction": 1.0, "busy": 0.971}
    result = {"rows": [full], "stage_s": [0.1, 0.3], "imbalance": 0.5}
    text = shown(result_table(result), width=80)
    lines = [line.split() for line in text.splitlines()]
    assert ["1", BOUND, "1234.5", "1.50", "2.00", "1.000", "3.1%", "97.1%"] in lines
    assert ["M", "system", "ms/step", "ratio", "ideal", "bound", "waiting", "busy"] in lines
    assert "100.0, 300.0 ms" in text
    assert "50.0% above" in text


def test_columns_that_no_row_fills_are_left_out(shown):
    result = {"rows": [ROW, {**ROW, "ratio": None}], "stage_s": [0.1, 0.1], "imbalance": 0.0}
    text = shown(result_table(result), width=80)
    assert "waiting" in text
    assert "ideal" not in text
    assert "busy" not in text
    lines = [line for line in text.splitlines() if BOUND in line]
    assert lines[1].split()[3] == "-"


def test_a_group_ends_where_the_next_row_is_of_another():
    rows = [{"group": 1}, {"group": 1}, {"group": 2}]
    found = [ends for _, ends in with_ends(rows, lambda row: row["group"])]
    assert found == [False, True, False]  # nothing ends behind the last one
