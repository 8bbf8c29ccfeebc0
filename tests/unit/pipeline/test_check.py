# SPDX-License-Identifier: Apache-2.0
"""Checks of plans: what they report, and that they refuse what a slow, declarative twin refuses."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.orders import inference, one_f_one_b, pipemare
from wavemare.pipeline.plan.plan import Action, Kind, Plan
from wavemare.pipeline.staleness.staleness import max_staleness, mean_staleness
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

many = settings(max_examples=50)
stages = st.integers(1, 16)
sizes = st.integers(1, 64)
counts = st.integers(1, 4)
options = st.fixed_dictionaries(
    {name: st.integers(0, 3) for name in ("warmup_steps", "drain_interval")}
    | {name: st.booleans() for name in ("correct", "norms")}
)


def with_rank(plan, rank, actions):
    ranks = [*plan.ranks]
    ranks[rank] = tuple(actions)
    return replace(plan, ranks=tuple(ranks))


def parsed(text):
    return [Action.parse(word) for word in text.split()]


# What a check reports.


@many
@given(stages, sizes, counts, options, st.integers(2, 4))
def test_pipemare_plans_are_sound(num_stages, micro_batches, num_steps, options, send_slots):
    plan = pipemare(num_stages, micro_batches, num_steps, **options)
    warmup_steps, drain_interval = options["warmup_steps"], options["drain_interval"]
    report = check(replace(plan, send_slots=send_slots))
    ends = [
        step + 1
        for step in range(num_steps)
        if step < warmup_steps or (drain_interval and (step + 1) % drain_interval == 0)
    ]
    ends = sorted({*ends, num_steps})
    stretches = [end - start for start, end in pairwise([0, *ends])]
    fill = 2 * (num_stages - 1)
    assert report.ticks == 2 * micro_batches * num_steps + fill * len(stretches)
    assert report.idle_ticks == (fill * len(stretches),) * num_stages
    longest = micro_batches * max(stretches)
    assert report.peak_activations == tuple(min(num_stages - s, longest) for s in range(num_stages))
    assert report.actions == tuple(map(len, plan.ranks))
    assert set(report.staleness[-1]) == {0}
    if len(stretches) == 1:
        for stage, got in enumerate(report.staleness):
            delay = num_stages - 1 - stage
            assert got == tuple(
                m // micro_batches - max(0, math.floor((m - delay) / micro_batches))
                for m in range(micro_batches * num_steps)
            )
            if delay <= micro_batches * (num_steps - 1):
                settled = got[-micro_batches:]
                assert max_staleness(stage, num_stages, micro_batches) == max(settled)
                mean = sum(settled) / micro_batches
                assert mean_staleness(stage, num_stages, micro_batches) == pytest.approx(mean)
    links = num_stages - 1
    messages = {
        Kind.SEND_ACTIVATION: links * micro_batches * num_steps,
        Kind.SEND_GRAD: links * micro_batches * num_steps,
        Kind.SEND_NORM: links * num_steps * options["norms"],
        Kind.SEND_TOTAL: links * stretches.count(1) * options["norms"],
    }
    assert report.messages == {kind: number for kind, number in messages.items() if number}


@many
@given(num_stages=stages, micro_batches=sizes, num_steps=counts)
def test_1f1b_plans_are_sound(num_stages, micro_batches, num_steps):
    report = check(one_f_one_b(num_stages, micro_batches, num_steps))
    assert report.ticks == 2 * num_steps * (micro_batches + num_stages - 1)
    assert report.bubble == pytest.approx((num_stages - 1) / (micro_batches + num_stages - 1))
    assert report.peak_activations == tuple(
        min(num_stages - stage, micro_batches) for stage in range(num_stages)
    )
    assert report.max_staleness == (0,) * num_stages


def test_the_report_is_readable():
    report = check(pipemare(2, 2, 2, norms=True))
    assert str(report).splitlines() == [
        "pipemare: stages 2, micro-batches per step 2, optimizer steps 2",
        "length: 10 ticks of one pass each",
        "bubble: 20.0% of all ticks",
        "messages: 4 activations, 4 gradients, 2 norms, 0 total norms",
        "",
        "stage  peak activations  max staleness   mean  actions  idle ticks",
        "    0                 2              1  0.250       26           2",
        "    1                 1              0  0.000       26           2",
    ]


# What a check refuses.


def edited(plan, **changes):
    """Return a plan in whose text forms words are replaced: ``r1={"1B0@0": "1B1@0"}``."""
    for name, words in changes.items():
        rank = int(name.removeprefix("r"))
        text = " ".join(map(str, plan.ranks[rank]))
        for old, new in words.items():
            assert f" {old} " in f" {text} "
            text = f" {text} ".replace(f" {old} ", f" {new} ").strip()
        plan = with_rank(plan, rank, parsed(text))
    return plan


ASYNCHRONOUS = pipemare(2, 2, 2, norms=True, correct=True)
# 0: 0L0@0 0F0@0 0SA0@0 0L1@0 0F1@0 0SA1@0 0RG0@0 0B0@0 0L2@0 0F2@0 0SA2@0 0RG1@0 0B1@0 0R1@0 0RN1@0
#    0S1@0 0L3@1 0F3@1 0SA3@1 0C2@0 0RG2@1 0B2@1 0U2@1 0RG3@1 0B3@1 0R3@1 0RN3@1 0S3@1
# 1: 1RA0@0 1L0@0 1F0@0 1B0@0 1SG0@0 1RA1@0 1L1@0 1F1@0 1B1@0 1SG1@0 1R1@0 1SN1@0 1S1@0
#    1RA2@1 1L2@1 1F2@1 1B2@1 1SG2@1 1RA3@1 1L3@1 1F3@1 1B3@1 1SG3@1 1R3@1 1SN3@1 1S3@1


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"r0": {"0L1@0": ""}}, ("action", "0F1@0")),
        ({"r1": {"1F1@0 1B1@0": "1B1@0 1F1@0"}}, ("action", "1B1@0")),
        ({"r0": {"0R1@0": ""}}, ("action", "0S1@0")),
        ({"r1": {"1B1@0 1SG1@0 1R1@0": "1R1@0 1B1@0 1SG1@0"}}, ("action", "1R1@0")),
        ({"r0": {"0F1@0": "0F1@0 0F1@0"}}, ("action", "0F1@0")),
        ({"r1": {"1S1@0": "1S1@0 1R1@1"}}, ("action", "1R1@1")),
        ({"r1": {"1S1@0": "", "1R1@0": "", "1SN1@0": ""}}, ("action", "1RA2@1")),
        ({"r0": {"0SA3@1": ""}}, ("action", "0SA3")),
        ({"r1": {"1R3@1": "", "1SN3@1": "", "1S3@1": ""}}, ("steps", 2)),
        ({"r1": {"1SN1@0": ""}}, ("action", "0RN1@0")),
        ({"r0": {"0RN3@1": ""}}, ("action", "1SN3@1")),
        ({"r0": {"0F2@0": "0F2@1"}}, ("action", "0F2@1")),
        ({"r0": {"0U2@1": ""}}, ("action", "0RG3@1")),
        ({"r0": {"0C2@0": ""}}, ("action", "0U2@1")),
        ({"r0": {"0C2@0 0RG2@1 0B2@1": "0RG2@1 0B2@1 0C2@0"}}, ("action", "0C2@0")),
        ({"r0": {"0B3@1": "0C3@1 0B3@1"}}, ("action", "0R3@1")),
        ({"r1": {"1SG1@0": "1SG1@0 1RG1@0"}}, ("action", "1RG1@0")),
        ({"r0": {"0L3@1": "0L3@1 0L4@1"}}, ("action", "0F4")),
        ({"r0": {"0F1@0": "0F1@0 1F1@0"}}, ("action", "1F1@0")),
        ({"r0": {"0F1@0": "0F1@0 2F1@0"}}, ("action", "2F1@0")),
    ],
)
def test_a_damaged_plan_is_refused_by_its_action(changes, refusal):
    with refuses(PlanError, *refusal):
        check(edited(ASYNCHRONOUS, **changes))


def test_backward_passes_belong_to_their_step():
    plan = edited(pipemare(1, 1, 2), r0={"0B0@0 0R0@0 0S0@0 0L1@1 0F1@1": "0L1 0F1 0B1 0R0 0S0"})
    with refuses(PlanError, "action", "0B1"):
        check(plan)


def test_swapped_messages_are_refused_on_the_receiving_side():
    swap = {"1RA0@0 1L0@0 1F0@0 1B0@0 1SG0@0 1RA1@0": "1RA1@0 1RA0@0 1L0@0 1F0@0 1B0@0 1SG0@0"}
    with refuses(PlanError, "action", "1RA1@0"):
        check(edited(ASYNCHRONOUS, r1=swap))


def test_both_ends_of_the_pipeline_read_the_same_stream():
    first = {"0L0@0 0F0@0 0SA0@0 0L1@0": "0L1@0 0L0@0 0F0@0 0SA0@0"}
    with refuses(PlanError, "action", "1L0@0"):
        check(edited(ASYNCHRONOUS, r0=first))


def test_a_correction_that_nothing_ends_is_refused():
    plan = edited(pipemare(1, 1, 1), r0={"0B0@0 0R0@0 0S0@0": "0R0 0C0"})
    with refuses(PlanError, "action", "0R0"):
        check(plan)
    plan = inference(1, 1)
    with refuses(PlanError, "action", "0C0@0"):
        check(with_rank(plan, 0, [*plan.ranks[0], Action(Kind.CORRECT, 0, 0, 0)]))
    text = "0L0 0F0 0L1 0F1 0B0 0R0 0S0 0C1 0B1"
    with refuses(PlanError, "action", "0C1"):
        check(with_rank(pipemare(1, 1, 2), 0, parsed(text)))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_stages": 0}, "stages"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"num_steps": -1}, "steps"),
        ({"send_slots": 0}, "send_slots"),
        ({"ranks": ()}, "plan"),
        ({"ranks": ((), ())}, "plan"),
        ({"num_stages": 3}, "plan"),
    ],
)
def test_impossible_numbers_are_refused(changes, key):
    with pytest.raises(PlanError) as info:
        check(replace(ASYNCHRONOUS, **changes))
    assert info.value.key == key


def test_ranks_that_wait_for_each_other_are_shown():
    """Both ranks send two messages before they receive one, and each has one slot."""
    passes = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    plan = lower(Plan("circle", 2, 2, 1, tuple(tuple(parsed(row)) for row in passes)))
    plan = edited(plan, r1={"1F0@0 1B0@0 1SG0@0 1RA1@0 1L1@0": "1L1@0 1F0@0 1B0@0 1SG0@0 1RA1@0"})
    plan = edited(plan, r1={"1RA0@0 1L0@0": "1RA1@0 1RA0@0 1L0@0", "1SG0@0 1RA1@0": "1SG0@0"})
    check(replace(plan, send_slots=2))
    with pytest.raises(PlanError) as info:
        check(replace(plan, send_slots=1))
    assert info.value.reason.splitlines() == [
        "it never ends, as its ranks come no further than here",
        "  rank 0: 0SA0@0 0L1@0 0F1@0 0SA1@0 <-- waits for 1RA0; then 0RG0@0 0B0@0 0RG1@0",
        "  rank 1: 1RA1@0 <-- waits for 0SA1; then 1RA0@0 1L0@0 1L1@0",
        "ranks 0, 1 wait for each other in a circle",
    ]


def test_a_rank_may_hold_several_stages():
    """A pipeline of 4 stages that is folded: ranks 0 and 1 hold stages 0 and 3, 1 and 2."""
    ranks = (
        parsed("0L0 0F0 0SA0 0L1 0F1 0SA1 3RA0 3F0 3RA1 3F1"),
        parsed("1RA0 1F0 2F0 2SA0 1RA1 1F1 2F1 2SA1"),
    )
    plan = Plan("folded", 4, 2, 0, tuple(map(tuple, ranks)), send_slots=1, homes=(0, 1, 1, 0))
    report = check(plan)
    assert report.ticks == 6
    assert report.idle_ticks == (2, 2)
    assert str(report).splitlines()[-3:] == [
        "rank  actions  idle ticks",
        "   0       10           2",
        "   1        8           2",
    ]
    twice = with_rank(plan, 1, [*plan.ranks[1], Action(Kind.LOAD, 0, 0)])
    with refuses(PlanError, "action", "0L0"):
        check(twice)
    with refuses(PlanError, "homes", ""):
        check(replace(plan, homes=()))


# Waves: all stages on one rank.


@pytest.mark.parametrize(
    ("swap", "refusal"),
    [
        ({"0F0 1F0": "1F0 0F0"}, ("action", "1F0")),
        ({"2F0 2B0 1B0": "2F0 1B0 2B0"}, ("action", "1B0")),
        ({"0L1 ": "", "0F1": "0L1 0F1 1SA1"}, ("action", "1SA1")),
        ({"0S1": ""}, ("steps", 1)),
        ({"0F0 1F0": "0F0 0XO0 1F0"}, ("action", "0XO0")),
    ],
)
def test_a_damaged_plan_of_waves_is_refused_by_its_action(swap, refusal):
    text = "0L0 0F0 1F0 2F0 2B0 1B0 0L1 0F1 0B0 1F1 2F1 2B1 1B1 0B1 0R1 0N1 0S1"
    plan = Plan("tick-tock", 3, 2, 1, (tuple(parsed(text)),), homes=(0, 0, 0))
    assert check(plan).ticks == 12
    for old, new in swap.items():
        assert old in text
        text = text.replace(old, new)
    with refuses(PlanError, *refusal):
        check(with_rank(plan, 0, parsed(text)))


def test_a_plan_of_waves_reports_two_micro_batches_at_its_first_stages():
    report = check(tick_tock(4, 3, 2))
    assert report.peak_activations == (2, 1, 1, 1)
    assert check(in_phase(4, 3)).peak_activations == (2, 2, 2, 1)
    assert check(accumulation(4, 3)).peak_activations == (1, 1, 1, 1)
    assert (report.ticks, report.bubble, report.messages) == (4 * 3 * 2 * 2, 0, {})
