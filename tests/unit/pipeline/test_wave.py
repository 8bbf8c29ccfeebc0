# SPDX-License-Identifier: Apache-2.0
"""Plans of waves: their order, their groups, and where collectives find something to run behind."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind
from wavemare.pipeline.wave.schedule import (
    accumulation,
    in_phase,
    tick_tock,
)

some = settings(max_examples=100)


@st.composite
def rows(draw, largest=8):
    """Return a number of segments with their flags, as keywords."""
    size = draw(st.integers(1, largest))
    flags = st.lists(st.booleans(), min_size=size, max_size=size)
    up, down = draw(st.just([]) | flags), draw(st.just([]) | flags)
    return size, {"sums_output": up and [*up[:-1], False], "sums_gradient": down}


@st.composite
def plans(draw):
    """Return a plan of any schedule, with its row of segments."""
    (size, sums), micro_batches, num_steps = draw(rows()), draw(st.integers(1, 5)), 2
    kind = draw(st.sampled_from(["accumulation", "in-phase", "tick-tock"]))
    if kind == "accumulation":
        return accumulation(size, micro_batches, num_steps), sums
    if kind == "in-phase":
        return in_phase(size, micro_batches, num_steps, **sums), sums
    return tick_tock(size, micro_batches, num_steps, **sums), sums


def passes(plan):
    return [action for action in plan.ranks[0] if action.kind in COMPUTE]


def text(actions):
    return " ".join(map(str, (a._replace(version=-1) for a in actions)))


# Norm, products, norm, products, norm, head.
CHAIN = {"sums_output": [0, 1, 0, 1, 0, 0], "sums_gradient": [0, 1, 0, 1, 0, 0]}
HEAD_SUMS = {"sums_output": [1, 0, 1, 0], "sums_gradient": [0, 1, 0, 1]}
BEHIND_HEAD = "0F0 1F0 2F0 3F0 3B0 0F1 2B0 1B0 1F1 2F1 0B0 3F1 3B1 2B1 1B1 0B1"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            tick_tock(3, 3),
            "0F0 1F0 2F0 2B0 1B0 0F1 0B0 1F1 2F1 2B1 1B1 0F2 0B1 1F2 2F2 2B2 1B2 0B2",
        ),
        (in_phase(3, 3), "0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1 0F2 1F2 2F2 2B2 1B2 0B2"),
        (
            tick_tock(6, 2, **CHAIN),
            "0F0 1F0 2F0 3F0 4F0 5F0 5B0 4B0 3B0 0F1 1F1 2B0 1B0 2F1 3F1 0B0 4F1 5F1 5B1 4B1 3B1 "
            "2B1 1B1 0B1",
        ),
        (
            in_phase(6, 2, **CHAIN),
            "0F0 1F0 0F1 1F1 2F0 3F0 2F1 3F1 4F0 4F1 5F0 5B0 5F1 5B1 4B0 3B0 4B1 3B1 2B0 1B0 2B1 "
            "1B1 0B0 0B1",
        ),
        (tick_tock(4, 2, **HEAD_SUMS), BEHIND_HEAD),
    ],
)
def test_the_order_of_passes(plan, expected):
    assert text(passes(plan)) == expected


@pytest.mark.parametrize("make", [accumulation, in_phase, tick_tock])
def test_a_model_that_is_only_a_head(make):
    assert text(make(1, 2).ranks[0]) == "0L0 0F0 0B0 0L1 0F1 0B1 0R1 0N1 0S1"


# Properties of all of them.


@some
@given(made=plans())
def test_every_pass_is_done_once_in_an_order_that_can_be_run(made):
    plan, _ = made
    report = check(plan)
    assert report.max_staleness == (0,) * plan.num_stages
    assert not report.messages
    assert report.idle_ticks == (0,)
    found = passes(plan)
    everything = range(plan.micro_batches * plan.num_steps)
    assert sorted(found) == sorted(
        Action(kind, s, m, m // plan.micro_batches)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for s in range(plan.num_stages)
        for m in everything
    )
    at = {action[:3]: i for i, action in enumerate(found)}
    head = plan.num_stages - 1
    for m in everything:
        way = [(Kind.FORWARD, s, m) for s in range(head + 1)]
        way += [(Kind.BACKWARD, s, m) for s in range(head, -1, -1)]
        assert [at[key] for key in way] == sorted(at[key] for key in way)
        assert at[Kind.BACKWARD, head, m] == at[Kind.FORWARD, head, m] + 1
    for stage in range(plan.num_stages):
        backwards = [a.micro_batch for a in found if a[:2] == (Kind.BACKWARD, stage)]
        assert backwards == [*everything]
        forwards = [a.micro_batch for a in found if a[:2] == (Kind.FORWARD, stage)]
        assert forwards == [*everything]


@some
@given(made=plans())
def test_backward_passes_of_two_micro_batches_never_mix_but_in_phase(made):
    plan, _ = made
    backwards = [a.micro_batch for a in passes(plan) if a.kind is Kind.BACKWARD]
    apart = backwards == sorted(backwards)
    assert apart or plan.schedule == "in-phase"


@some
@given(made=plans())
def test_steps_end_empty_with_at_most_two_waves_under_way(made):
    plan, _ = made
    under_way, steps = set(), []
    for action in plan.ranks[0]:
        if action.kind is Kind.LOAD:
            under_way.add(action.micro_batch)
            assert action.stage == 0
        if action.kind is Kind.BACKWARD and action.stage == 0:
            under_way.remove(action.micro_batch)
        assert len(under_way) <= (1 if plan.schedule == "accumulation" else 2)
        if action.kind in {Kind.REDUCE, Kind.STEP}:
            assert not under_way
            steps.append((action.kind, action.micro_batch))
    last = [plan.micro_batches * (k + 1) - 1 for k in range(plan.num_steps)]
    assert steps == [(kind, m) for m in last for kind in (Kind.REDUCE, Kind.STEP)]


# Collectives.


def unhidden(plan, sums):
    """Return collectives whose wait follows with no pass of the other wave in between.

    Those do not count of which the other wave has nothing that it could do then: it is before a
    head whose turn comes after this micro-batch, behind its last pass, or not in the step at all.
    """
    found = passes(plan)
    head = plan.num_stages - 1
    bare = []
    for i, (before, after) in enumerate(pairwise(found)):
        kind, stage, micro_batch, *_ = before
        flags = sums["sums_output" if kind is Kind.FORWARD else "sums_gradient"]
        if not flags or not flags[stage] or after.micro_batch != micro_batch:
            continue
        left = [
            a
            for a in found[i + 1 :]
            if a.micro_batch // plan.micro_batches == micro_batch // plan.micro_batches
            and a.micro_batch != micro_batch
        ]
        if kind is Kind.FORWARD:  # the other wave goes backward, if it is behind its head
            work = [a for a in left if a.micro_batch == micro_batch - 1]
        else:
            work = [a for a in left if a.micro_batch == micro_batch + 1 and a.stage < head]
            work = [a for a in work if a.kind is Kind.FORWARD]
        bare += [before] if work else []
    return bare


@some
@given(row=rows(), micro_batches=st.integers(2, 5))
def test_collectives_run_behind_the_other_wave_as_long_as_it_has_work(row, micro_batches):
    size, sums = row
    assume(any(sums["sums_output"]) or any(sums["sums_gradient"]))
    plan = tick_tock(size, micro_batches, **sums)
    assert unhidden(plan, sums) == []
    # The measure itself: without groups there is nothing in between.
    alone = accumulation(3, 2)
    assert unhidden(alone, {"sums_output": [], "sums_gradient": [False, True, False]})


# What is refused.


@pytest.mark.parametrize(
    ("key", "flags"),
    [
        ("sums_output", [True]),
        ("sums_gradient", [True] * 4),
        ("sums_output", [False, False, True]),
    ],
)
def test_impossible_options_are_refused(key, flags):
    with refuses(PlanError, key, tuple(flags)):
        tick_tock(3, 2, **{key: flags})
