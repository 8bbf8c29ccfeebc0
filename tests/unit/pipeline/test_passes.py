# SPDX-License-Identifier: Apache-2.0
"""Lowering passes: what each adds, and where."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.action import RECEIVES, SENDS, Action, Kind
from wavemare.pipeline.check import check
from wavemare.pipeline.order import Stream, compute_order
from wavemare.pipeline.passes import (
    Versions,
    add_communication,
    add_steps,
    defer_sends,
    pair_passes,
    paired,
)
from wavemare.pipeline.schedules import one_f_one_b, paired_one_f_one_b


def parsed(text):
    return [Action.parse(word) for word in text.split()]


def shown(actions):
    return " ".join(map(str, actions))


def test_steps_come_after_the_backward_pass_that_completes_them():
    order = parsed("1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3")
    assert shown(add_steps(order, 3, ends=range(1, 4, 2))) == (
        "1F0 1F1 1B0 1F2 1B1 1R1 1S1 1F3 1B2 1B3 1R3 1S3"
    )


def test_norms_travel_to_the_first_stage_and_totals_back():
    def tail(stage, **options):
        order = parsed(f"{stage}F0 {stage}B0")
        return shown(list(add_steps(order, 3, ends={0}, **options))[2:])

    assert tail(2, norms=True) == "2R0 2SN0 2S0"
    assert tail(1, norms=True) == "1R0 1RN0 1SN0 1S0"
    assert tail(0, norms=True) == "0R0 0RN0 0S0"
    assert tail(2, norms=True, synchronous=True) == "2R0 2SN0 2RT0 2S0"
    assert tail(1, norms=True, synchronous=True) == "1R0 1RN0 1SN0 1RT0 1ST0 1S0"
    assert tail(0, norms=True, synchronous=True) == "0R0 0RN0 0ST0 0S0"
    assert tail(1, synchronous=True) == "1R0 1S0"
    assert shown(add_steps(parsed("0F0 0B0"), 1, ends={0}, norms=True, synchronous=True)) == (
        "0F0 0B0 0R0 0S0"
    )


def test_versions_count_steps_over_calls():
    versions = Versions()
    first = shown(versions.annotate(parsed("0F0 0F1 0B0 0S0 0F2")))
    second = shown(versions.annotate(parsed("0B1 0R1 0S1 0F3 0B2")))
    assert first == "0F0@0 0F1@0 0B0@0 0S0@0 0F2@1"
    assert second == "0B1@1 0R1@1 0S1@1 0F3@2 0B2@2"


def test_stale_backward_passes_alone_are_corrected():
    order = parsed("0F0 0F1 0B0 0S0 0F2 0B1 0S1 0F3 0S9 0B3/1 0B2")
    assert shown(Versions(correct=True).annotate(order)) == (
        "0F0@0 0F1@0 0B0@0 0S0@0 0F2@1 0C1@0 0B1@1 0W1@1 0S1@1 0F3@2 0S9@2 "
        "0C3@2/1 0B3@3/1 0W3@3/1 0C2@1 0B2@3 0W2@3"
    )


def test_forgotten_forward_passes_take_the_newest_version():
    versions = Versions(correct=True)
    list(versions.annotate(parsed("0F0 0F1 0F2 0S0")))
    versions.forget(1)
    assert shown(versions.annotate(parsed("0B0 0B1 0F2 0B2"))) == (
        "0C0@0 0B0@1 0W0@1 0B1@1 0F2@1 0B2@1"
    )


def test_communication_depends_on_the_neighbours():
    def around(stage, num_stages):
        order = parsed(f"{stage}F5@2/1 {stage}B5@3/1 {stage}S5@3")
        return shown(add_communication(order, num_stages))

    assert around(0, 1) == "0L5@2/1 0F5@2/1 0B5@3/1 0S5@3"
    assert around(0, 3) == "0L5@2/1 0F5@2/1 0SA5@2/1 0RG5@3/1 0B5@3/1 0S5@3"
    assert around(1, 3) == "1RA5@2/1 1F5@2/1 1SA5@2/1 1RG5@3/1 1B5@3/1 1SG5@3/1 1S5@3"
    assert around(2, 3) == "2RA5@2/1 2L5@2/1 2F5@2/1 2B5@3/1 2SG5@3/1 2S5@3"


@settings(max_examples=60)
@given(num_stages=st.integers(2, 16), micro_batches=st.integers(1, 32), data=st.data())
def test_deferred_sends_keep_everything_else_in_order(num_stages, micro_batches, data):
    stage = data.draw(st.integers(0, num_stages - 1))
    order = compute_order(
        stage, num_stages, first=0, last=micro_batches, forwarded=0, stop=micro_batches
    )
    before = list(add_communication(order, num_stages))
    after = list(defer_sends(before, num_stages))
    activations = Kind.SEND_ACTIVATION
    assert [a for a in after if a.kind is not activations] == [
        a for a in before if a.kind is not activations
    ]
    assert [a for a in after if a.kind in SENDS] == [a for a in before if a.kind in SENDS]
    behind = {
        send.micro_batch - receive.micro_batch
        for receive, send in pairwise(after)
        if receive.kind is Kind.RECV_GRAD and send.kind is activations
    }
    # Where the next stage is one backward pass behind in its forward passes, and only there.
    steady = stage < num_stages - 1 and micro_batches >= num_stages - stage
    assert behind == ({num_stages - 1 - stage} if steady else set())


def test_a_pair_receives_before_both_passes_and_sends_after_them():
    order = parsed("1RA0 1F0 1SA0 1RG0 1B0 1SG0 1RA1 1F1 1SA1 1RG1 1B1 1SG1 1R1 1S1 1RA2 1F2 1SA2")
    assert shown(pair_passes(order)) == (
        "1RA0 1F0 1SA0 1RG0 1RA1 1B0 1F1 1SG0 1SA1 1RG1 1B1 1SG1 1R1 1S1 1RA2 1F2 1SA2"
    )
    last = parsed("1RA0 1L0 1F0 1B0 1SG0 1RA1 1L1 1F1 1B1 1SG1")
    assert shown(pair_passes(last)) == "1RA0 1L0 1F0 1RA1 1L1 1B0 1F1 1SG0 1B1 1SG1"


def test_a_corrected_pass_stays_alone():
    order = "1C0@0 1RG0 1B0 1W0 1SG0 1RA3 1F3"
    assert shown(pair_passes(parsed(order))) == order


def test_pairs_are_taken_together():
    order = parsed("0F0 0F1 0B0 0F2 0B1 0B2 0S2 0F3 0B3")
    groups = [shown(group) for group in paired(order)]
    assert groups == ["0F0", "0F1", "0B0 0F2", "0B1", "0B2", "0S2", "0F3", "0B3"]


sizes = st.tuples(st.integers(1, 7), st.integers(1, 12), st.integers(1, 3))


@given(sizes)
def test_paired_plans_end_with_slots_and_forward_twice_as_far(size):
    num_stages, micro_batches, _ = size
    report = check(paired_one_f_one_b(*size))
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
        stream = Stream(stage, num_stages, micro_batches, slack=1)
        window = [action for _ in range(steps) for action in stream.window()]
        row = list(pair_passes(window))
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
    plan = paired_one_f_one_b(3, 6)
    with pytest.raises(PlanError, match="wait"):
        check(dataclasses.replace(plan, send_slots=0))
    check(dataclasses.replace(plan, send_slots=1))
