# SPDX-License-Identifier: Apache-2.0
"""The passes of segments, and pairs of a backward and a forward pass that run together."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.lowering import StageSchedule, in_pairs, overlap_forward_backward
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action, Kind
from wavemare.pipeline.plan.schedules import one_f_one_b, overlapped_one_f_one_b


def parsed(text):
    return [Action.parse(word) for word in text.split()]


def shown(actions):
    return " ".join(map(str, actions))


def test_a_pair_receives_before_both_passes_and_sends_after_them():
    order = parsed("1RA0 1F0 1SA0 1RG0 1B0 1SG0 1RA1 1F1 1SA1 1RG1 1B1 1SG1 1R1 1S1 1RA2 1F2 1SA2")
    assert shown(overlap_forward_backward(order)) == (
        "1RA0 1F0 1SA0 1RG0 1RA1 1B0 1F1 1SG0 1SA1 1RG1 1B1 1SG1 1R1 1S1 1RA2 1F2 1SA2"
    )
    last = parsed("1RA0 1L0 1F0 1B0 1SG0 1RA1 1L1 1F1 1B1 1SG1")
    assert shown(overlap_forward_backward(last)) == "1RA0 1L0 1F0 1RA1 1L1 1B0 1F1 1SG0 1B1 1SG1"


def test_a_corrected_pass_stays_alone():
    order = "1C0@0 1RG0 1B0 1U0 1SG0 1RA3 1F3"
    assert shown(overlap_forward_backward(parsed(order))) == order


def test_pairs_are_taken_together():
    order = parsed("0F0 0F1 0B0 0F2 0B1 0B2 0S2 0F3 0B3")
    groups = [str(each).removeprefix("Pair ") for each in in_pairs(order)]
    assert groups == ["0F0", "0F1", "0B0 0F2", "0B1", "0B2", "0S2", "0F3", "0B3"]


sizes = st.tuples(st.integers(1, 7), st.integers(1, 12), st.integers(1, 3))


@given(sizes)
def test_paired_plans_end_with_slots_and_forward_twice_as_far(size):
    num_stages, micro_batches, _ = size
    report = check(overlapped_one_f_one_b(*size))
    plain = check(one_f_one_b(*size))
    for stage, peak in enumerate(report.peak_activations):
        ahead = 2 * (num_stages - 1 - stage)
        assert peak == min(ahead + 1, micro_batches)
    assert sum(report.actions) == sum(plain.actions)
    assert report.messages == plain.messages


@given(sizes)
def test_only_the_place_of_messages_and_loads_changes(size):
    num_stages, micro_batches, steps = size
    for stage in range(num_stages):
        schedule = StageSchedule(stage, num_stages, micro_batches, slack=1)
        window = [action for _ in range(steps) for action in schedule.step()]
        row = list(overlap_forward_backward(window))
        assert sorted(row) == sorted(window)
        moved = {*SENDS, *RECEIVES, Kind.LOAD}
        for kinds in (set(Kind) - moved, {Kind.SEND_GRAD, Kind.SEND_NORM}, {Kind.RECV_ACTIVATION}):
            kept = [[a for a in rank if a.kind in kinds] for rank in (row, window)]
            assert kept[0] == kept[1]
        for before, after in pairwise(row):
            if (before.kind, after.kind) == (Kind.BACKWARD, Kind.FORWARD):
                kind = Kind.RECV_ACTIVATION if stage else Kind.LOAD
                assert row.index(after._replace(kind=kind)) < row.index(before)


def test_with_blocking_sends_pairs_wait_in_a_circle():
    plan = overlapped_one_f_one_b(3, 6)
    with pytest.raises(PlanError, match="wait"):
        check(dataclasses.replace(plan, send_slots=0))
    check(dataclasses.replace(plan, send_slots=1))


@pytest.mark.parametrize(
    ("stops", "synchronous"),
    [([2, 4], [True, True]), ([4, 4], [False, False]), ([None, 4, 6], [False, False, True])],
)
def test_a_step_is_synchronous_between_two_empty_pipelines(stops, synchronous):
    for stage in range(3):
        schedule = StageSchedule(stage, 3, 2, norms=True)
        for stop, expected in zip(stops, synchronous, strict=True):
            kinds = {action.kind for action in schedule.step(stop)}
            assert bool(kinds & {Kind.SEND_TOTAL, Kind.RECV_TOTAL}) is expected
            assert Kind.SEND_NORM in kinds or stage == 0
