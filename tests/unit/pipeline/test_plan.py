# SPDX-License-Identifier: Apache-2.0
"""Plans and their text form."""

from hypothesis import given
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.plan.orders import inference, one_f_one_b, pipemare
from wavemare.pipeline.plan.plan import Action, Kind, Plan

actions = st.builds(
    Action,
    kind=st.sampled_from(Kind),
    stage=st.integers(0, 99),
    micro_batch=st.integers(0, 999),
    version=st.integers(-1, 99),
)
any_plans = st.builds(
    Plan,
    schedule=st.text("ab1_-= \t\n\u2028", max_size=9),
    num_stages=st.integers(0, 99),
    micro_batches=st.integers(0, 99),
    num_steps=st.integers(0, 99),
    ranks=st.lists(st.lists(actions, max_size=6).map(tuple), max_size=5).map(tuple),
    send_slots=st.integers(0, 9),
)
sound_plans = st.one_of(
    st.builds(
        pipemare,
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 3),
        norms=st.booleans(),
        correct=st.booleans(),
    ),
    st.builds(one_f_one_b, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.builds(inference, st.integers(1, 4), st.integers(1, 4)),
)


@given(plan=any_plans | sound_plans)
def test_the_text_form_is_read_back(plan):
    assert Plan.parse(str(plan)) == plan


def test_a_name_has_no_white_space():
    assert Plan(" my first\tgpipe", 1, 1, 1, ()).schedule == "my_first_gpipe"


def test_the_text_form_of_a_small_plan():
    assert str(one_f_one_b(2, 1)) == (
        "plan schedule=1f1b stages=2 micro_batches=1 steps=1 send_slots=2\n"
        "0: 0L0@0 0F0@0 0SA0@0 0RG0@0 0B0@0 0R0@0 0N0@0 0S0@0\n"
        "1: 1RA0@0 1L0@0 1F0@0 1B0@0 1SG0@0 1R0@0 1N0@0 1S0@0\n"
    )


@given(plan=sound_plans, data=st.data())
def test_comments_and_empty_lines_are_passed_over(plan, data):
    lines = str(plan).splitlines()
    for extra in data.draw(st.lists(st.sampled_from(["", "  ", "# note", "  # 0F1"]), max_size=5)):
        lines.insert(data.draw(st.integers(0, len(lines))), extra)
    assert Plan.parse("\n".join(lines)) == plan


@given(data=st.data())
def test_damaged_text_is_refused_or_read_exactly(data):
    text = str(data.draw(sound_plans))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 5)))
    damaged = text[:start] + data.draw(st.text("09FBSARG@/: =\n#x", max_size=3)) + text[end:]
    try:
        plan = Plan.parse(damaged)
    except PlanError:
        return
    assert Plan.parse(str(plan)) == plan
    # Nothing is dropped silently: the same actions, apart from leading zeros, are in the text.
    lines = [line for line in map(str.strip, damaged.splitlines()) if line and line[0] != "#"]
    words = [word for line in lines[1:] for word in line.partition(":")[2].split()]
    assert [Action.parse(word) for word in words] == [a for rank in plan.ranks for a in rank]
