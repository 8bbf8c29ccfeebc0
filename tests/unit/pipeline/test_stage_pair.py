# SPDX-License-Identifier: Apache-2.0
"""The passes of a stage's segments, alone and in pairs."""

from hypothesis import given
from hypothesis import strategies as st

from wavemare.pipeline.action import Kind
from wavemare.pipeline.stage_pair import backward_pass, forward_pass, pass_pair


def shown(actions):
    return " ".join(map(str, actions))


def test_a_pass_takes_all_segments():
    assert shown(forward_pass(3, 7)) == "0F7 1F7 2F7"
    assert shown(backward_pass(3, 7)) == "2B7 1B7 0B7"


def test_a_pair_alternates_where_sums_start():
    sums = [False, True, False, True, False]
    assert shown(pass_pair(sums, sums, backward=2, forward=4)) == (
        "4B2 3B2 0F4 1F4 2B2 1B2 2F4 3F4 0B2 4F4"
    )
    head = [False, False, False, False, True]
    assert shown(pass_pair(sums, head, backward=0, forward=1)) == (
        "4B0 0F1 1F1 3B0 2B0 1B0 0B0 2F1 3F1 4F1"
    )


flags = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12)


@given(flags)
def test_each_segment_goes_once_in_its_order_and_sums_meet_the_other_pass(given_flags):
    up, down = ([pair[place] for pair in given_flags] for place in (0, 1))
    actions = list(pass_pair(up, down, backward=0, forward=1))
    passes = {
        kind: [a.stage for a in actions if a.kind is kind] for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    assert passes[Kind.FORWARD] == list(range(len(up)))
    assert passes[Kind.BACKWARD] == list(reversed(range(len(up))))
    # Behind each sum comes a pass of the other micro-batch, as long as it has any left.
    for place, action in enumerate(actions[:-1]):
        forward = action.kind is Kind.FORWARD
        if (up if forward else down)[action.stage]:
            left = {other.kind for other in actions[place + 1 :]}
            if len(left) > 1:
                assert actions[place + 1].kind is not action.kind
