# SPDX-License-Identifier: Apache-2.0
"""From samples to rows and the table of ``benchmarks pipeline``: numbers worked out by hand."""

import pytest

from benchmarks.pipeline.measure import Sample, build_rows
from benchmarks.pipeline.request import PipelineRequest
from benchmarks.pipeline.systems import Busy
from benchmarks.result import result_table

STOCK, OURS, BOUND = "deepspeed-1f1b", "wavemare-pipemare", "no-communication-bound"
IDLE = [0.0, 0.0]


def rounds(*slow):
    """Rounds of two ranks, the second of which is the slower one."""
    return [[Sample(seconds - 0.5, 0.1), Sample(seconds, 0.2)] for seconds in slow]


def test_the_median_is_that_of_the_slowest_ranks():
    samples = {
        (STOCK, 1): [
            [Sample(1.0, 0.1), Sample(4.0, 0.1)],
            [Sample(9.0, 0.1), Sample(2.0, 0.1)],
            *rounds(5.0),
        ]
    }
    (row,) = build_rows(PipelineRequest(micro_batches=(1,)), samples, IDLE)
    assert row["median_s"] == 5.0


def test_the_processor_time_is_the_median_of_the_means_over_ranks():
    used = [(1.0, 3.0), (8.0, 0.0), (9.0, 9.0)]
    samples = {(STOCK, 1): [[Sample(9.0, cpu_s) for cpu_s in ranks] for ranks in used]}
    (row,) = build_rows(PipelineRequest(micro_batches=(1,)), samples, IDLE)
    assert row["cpu_rounds_s"] == [2.0, 4.0, 9.0]
    assert row["cpu_s"] == 4.0


def test_what_idle_threads_take_is_no_processor_time_of_a_system():
    samples = {(STOCK, 1): [[Sample(4.0, 3.0), Sample(8.0, 3.0)]]}
    (row,) = build_rows(PipelineRequest(micro_batches=(1,)), samples, [0.25, 0.125])
    assert row["cpu_s"] == 2.0


def test_rows_are_ordered_and_compared_at_equal_micro_batches():
    request = PipelineRequest(micro_batches=(2, 1), systems=(BOUND, OURS, STOCK))
    samples = {
        (OURS, 1): rounds(2.0, 2.5, 30.0),
        (BOUND, 1): rounds(2.0, 2.0, 2.0),
        (STOCK, 1): rounds(5.0, 5.0, 4.0),
        (STOCK, 2): rounds(6.0, 6.0, 6.0),
        (OURS, 2): rounds(4.0, 4.0, 4.0),
    }
    rows = build_rows(request, samples, IDLE)
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
    assert ours["gradient_clipping"] == 0.0
    assert "utilisation" not in ours


def test_waiting_is_that_of_the_busiest_rank():
    idle = Sample(10.0, 1.0, Busy(compute_s=2.0, step_s=1.0, message_s=6.0))
    busy = Sample(10.0, 1.0, Busy(compute_s=5.0, step_s=3.0, message_s=1.0))
    slow = Sample(20.0, 1.0, Busy(compute_s=5.0, step_s=3.0, message_s=1.0))
    request = PipelineRequest(micro_batches=(1,), systems=(STOCK,))
    samples = {(STOCK, 1): [[idle, busy], [idle, slow], [idle, busy]]}
    (row,) = build_rows(request, samples, IDLE)
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
    request = PipelineRequest(stages=4, micro_batches=(4,), systems=(STOCK, OURS), synthetic=True)
    samples = {(STOCK, 4): rounds(0.24), (OURS, 4): rounds(0.15)}
    stock, ours = build_rows(request, samples, IDLE)
    assert stock["utilisation"] == pytest.approx(0.5)
    assert stock["ideal_utilisation"] == pytest.approx(4 / 7)
    assert ours["utilisation"] == pytest.approx(0.8)
    assert ours["ideal_utilisation"] == 1.0


def test_skipped_systems_have_a_reason(shown):
    request = PipelineRequest(micro_batches=(1, 2, 4), systems=("torch-1f1b", STOCK))
    (entry,) = request.skipped()
    assert (entry["system"], entry["stages"], entry["micro_batches"]) == ("torch-1f1b", 2, 1)
    assert "at least 2 micro-batches" in entry["reason"]
    rows = build_rows(request, {(STOCK, 4): rounds(2.0)}, IDLE)
    result = {"stage_s": [0.1, 0.3], "imbalance": 0.5, "rows": rows, "skipped": [entry]}
    (line,) = request.remarks(result)
    assert line == f"torch-1f1b is left out at M=1: {entry['reason']}"
    text = shown(result_table(request, result))
    assert "2 stages of 100.0, 300.0 ms" in text
    assert "waiting" not in text  # no row has it
