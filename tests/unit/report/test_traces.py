# SPDX-License-Identifier: Apache-2.0
"""Bubbles of noted steps, against numbers worked out by hand."""

import json

import pytest

from wavemare.report.runs import category, read_traces


@pytest.fixture
def trace(run_folder):
    return read_traces(run_folder)


def test_the_measured_bubble_is_that_of_the_spans(trace):
    # The step of rank 0 ends at 10: half of its optimizer step does not count.
    assert [rank.busy for rank in trace.ranks] == pytest.approx([(1 + 1 + 1.5 + 1.5 + 0.5) / 10, 1])
    assert trace.bubble == pytest.approx((0.45 + 0) / 2)
    assert trace.ranks[0].spans[0].start_s == 0
    assert trace.ranks[1].steps[0] == pytest.approx((2, 10))


def test_categories():
    texts = ["2F5@1", "0B3", "0S3", "1SA2", "1RG2", "0L1", "evaluation"]
    found = ["forward", "backward", "step", "message", "message", "other", "other"]
    assert [category(text) for text in texts] == found


def test_parts_of_before_a_resume_with_fewer_ranks_are_passed_over(run_folder):
    one = run_folder / "timeline" / "rank_00001.json"
    content = json.loads(one.read_text())
    one.write_text(json.dumps({**content, "first_step": 2, "steps": [[1.0, 2.0]]}))
    assert [rank.rank for rank in read_traces(run_folder).ranks] == [0]
    one.write_text(json.dumps(content))
    assert [rank.rank for rank in read_traces(run_folder, world_size=1).ranks] == [0]


def test_without_a_whole_step_there_is_no_trace(run_folder):
    for file in (run_folder / "timeline").glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "steps": []}))
    assert read_traces(run_folder) is None
    assert read_traces(run_folder.parent) is None
