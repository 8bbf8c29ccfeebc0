# SPDX-License-Identifier: Apache-2.0
"""Bubbles of noted steps, against numbers worked out by hand."""

import json
from itertools import accumulate

import pytest

from wavemare.pipeline.plan.action import Kind
from wavemare.report.traces import RankTrace, Span, Trace, category, read_traces


@pytest.fixture
def trace(run_folder):
    return read_traces(run_folder)


def test_the_measured_bubble_is_that_of_the_spans(trace):
    # The step of rank 0 ends at 10: half of its optimizer step does not count.
    assert [rank.busy for rank in trace.ranks] == pytest.approx([(1 + 1 + 1.5 + 1.5 + 0.5) / 10, 1])
    assert trace.bubble == pytest.approx((0.45 + 0) / 2)
    assert trace.ranks[0].spans[0].start_s == 0
    assert trace.ranks[1].steps[0] == pytest.approx((2, 10))
    # Medians by stage.
    assert trace.seconds(Kind.BACKWARD) == pytest.approx({0: 1.5, 1: 2.5})
    assert trace.seconds(Kind.LOAD) == {}


def test_the_predicted_bubble_of_1f1b_is_the_plan_with_the_measured_times(trace):
    # By hand, with F = 1, 1; B = 1.5, 2.5; S = 1, 1: stage 1 goes F0 1-2, B0 2-4.5, F1 4.5-5.5,
    # B1 5.5-8, S 8-9; stage 0 gets its last gradient at 8, and ends at 8 + 1.5 + 1 = 10.5.
    busy = (2 * 1 + 2 * 1.5 + 1) + (2 * 1 + 2 * 2.5 + 1)
    assert trace.predicted_bubble("1f1b", 2, 2) == pytest.approx(1 - busy / (2 * 10.5))


def test_the_predicted_bubble_of_pipemare_is_what_unevenness_leaves(trace):
    # A step takes stage 1 8 s, which never waits, and stage 0 6 s.
    assert trace.predicted_bubble("pipemare", 2, 2) == pytest.approx((1 - 6 / 8) / 2)
    assert trace.predicted_bubble("dualpipev", 2, 2) is None
    assert trace.predicted_bubble("1f1b", 3, 2) is None


def made(spans):
    """Return a trace of spans by their length, one after another on each rank."""
    ranks = []
    for rank, each in enumerate(spans):
        ends = list(accumulate(seconds for _, seconds in each))
        placed = tuple(
            Span(text, end - seconds, end) for (text, seconds), end in zip(each, ends, strict=True)
        )
        ranks.append(RankTrace(rank, rank, 11, "cpu", ((0.0, ends[-1]),), placed))
    return Trace(tuple(ranks))


UNEVEN = [[("0F0", 3.0), ("0B0", 3.0), ("0S1", 3.0)], [("1F0", 4.0), ("1B0", 3.0), ("1S1", 0.0)]]


def test_slack_changes_what_the_plan_predicts():
    trace = made(UNEVEN)
    # Of a step's four micro-batches stage 0 has 4 * 6 + 3 = 27 s of work, stage 1 4 * 7 = 28 s.
    # With slack stage 1 never waits. Without, the optimizer step of stage 0 delays stage 1's next
    # micro-batch by 2 s: one of the 3 s is what stage 0 is faster by.
    assert trace.predicted_bubble("pipemare", 2, 4) == pytest.approx(1 - (27 + 28) / 2 / 30)
    for slack in (1, 2):
        with_slack = trace.predicted_bubble("pipemare", 2, 4, slack=slack)
        assert with_slack == pytest.approx(1 - (27 + 28) / 2 / 28)


@pytest.mark.parametrize(("micro_batches", "slack"), [(1, 0), (1, 3), (2, 2), (2, 3)])
def test_what_is_ahead_at_the_start_does_not_count(micro_batches, slack):
    """Stage 0 is the slower one; until the other has used up its lead, that one sets the pace."""
    work = (micro_batches * 6 + 3, micro_batches * 7)
    found = made(UNEVEN).predicted_bubble("pipemare", 2, micro_batches, slack=slack)
    assert found == pytest.approx(1 - sum(work) / 2 / work[0])


def test_equal_stages_have_no_bubble_and_none_below_0():
    stages = [[(f"{s}F0", 0.1), (f"{s}B0", 0.7), (f"{s}S1", 0.3)] for s in range(3)]
    for micro_batches in (1, 3, 8):
        found = made(stages).predicted_bubble("pipemare", 3, micro_batches)
        assert found == pytest.approx(0, abs=1e-9)
        assert found >= 0


def test_of_passes_in_pairs_or_without_a_length_nothing_is_predicted():
    trace = made([[*UNEVEN[0], ("Pair 0B1 0F2", 5.0)], UNEVEN[1]])
    assert trace.has_pairs
    assert trace.predicted_bubble("pipemare", 2, 4) is None
    assert not made(UNEVEN).has_pairs
    timeless = made([[(text, 0.0) for text, _ in each] for each in UNEVEN])
    assert timeless.predicted_bubble("pipemare", 2, 4) is None


def test_categories():
    texts = ["2F5@1", "0B3/1", "0S3", "1SA2", "1RG2", "0L1", "evaluation", "Pair 0B3 0F5"]
    found = ["forward", "backward", "step", "message", "message", "other", "other", "backward"]
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
