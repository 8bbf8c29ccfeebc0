# SPDX-License-Identifier: Apache-2.0
"""Checks of plans with homes and split passes: refusals by name, messages and memory."""

import math
from dataclasses import replace

import pytest

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.plan.check import Memory, check
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.orders import inference, interleaved, zbv
from wavemare.pipeline.plan.plan import Action, Plan


def edited(plan, *changes):
    """Replace words of the plan's text, each of which is there once."""
    text = str(plan)
    for old, new in changes:
        assert text.count(old) == 1, text
        text = text.replace(old, new)
    return Plan.parse(text)


# plan schedule=zbv stages=4 micro_batches=2 steps=1 send_slots=2 homes=0,1,1,0
# 0: 0L0 0F0 0SA0 0L1 0F1 0SA1 3RA0 3F0 3I0 3SG0 3W0 3RA1 3F1 3I1 3SG1 3W1 0RG0 0I0 0W0 0RG1 0I1
#    0W1 0R1 0N1 0S1
# 1: 1RA0 1F0 2F0 2SA0 1RA1 1F1 2F1 2SA1 2RG0 2I0 2W0 1I0 1SG0 1W0 2RG1 2I1 2W1 1I1 1SG1 1W1 1R1
#    1N1 1S1
VEE = Plan.parse(str(zbv(2, 2)).replace("@0", ""))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        # Complete.
        ([(" 3I0", "")], ("action", "3SG0")),
        ([(" 3W0", " 3B0")], ("action", "3B0")),
        ([(" 3I0", " 3I0 3I0")], ("action", "3I0")),
        # Order, also where a boundary has no message.
        ([(" 1F0 2F0", " 2F0 1F0")], ("action", "2F0")),
        ([(" 2I1 2W1 1I1 1SG1", " 1I1 1SG1 2I1 2W1")], ("action", "1I1")),
        ([(" 0I0 0W0", " 0W0 0I0")], ("action", "0W0")),
        # The order of the gradients of the weights.
        (
            [(" 0W0", ""), (" 0W1", " 0W1 0W0")],
            ("action", "0W1"),
        ),
        # Step.
        ([(" 0W1 0R1", " 0R1 0W1")], ("action", "0R1")),
        ([(" 0N1 0S1", " 0S1 0N1")], ("action", "0S1")),
        (
            [(" 0R1 0N1 0S1", " 3R1 3N1 3S1")],
            ("action", "3R1"),
        ),
        # Messages.
        ([(" 2SA1", "")], ("action", "2SA1")),
        ([(" 3RA0 3F0", " 3RA0 3RA0 3F0")], ("action", "3RA0")),
        ([(" 2F0 2SA0", " 2RA0 2F0 2SA0")], ("action", "2RA0")),
        # It ends.
        ([(" 1SG1", ""), (" 1N1", " 1N1 1SG1")], ("plan", "zbv")),
        (
            [("0L1 0F1 0SA1 3RA0", "3RA0 0L1 0F1 0SA1"), (" 2SA0 1RA1 1F1", " 1RA1 1F1 2SA0")],
            ("plan", "zbv"),
        ),
        # Homes.
        (
            [("homes=0,1,1,0", "homes=0,1,1")],
            ("homes", (0, 1, 1)),
        ),
        ([("homes=0,1,1,0", "homes=0,1,0,1")], ("action", "3RA0")),
        ([(" homes=0,1,1,0", "")], ("homes", "")),
        ([("homes=0,1,1,0", "homes=0,,1,0")], ("homes", "")),
        # What only plans have that are never empty, or waves.
        ([(" 0I0", " 0C0 0I0 0U0")], ("action", "0C0")),
    ],
)
def test_a_damaged_plan_is_refused_by_its_action(changes, refusal):
    assert check(VEE)
    with refuses(PlanError, *refusal):
        check(edited(VEE, *changes))


def test_no_forward_pass_comes_before_its_own_step():
    plan = Plan("late", 1, 1, 2, (tuple(map(Action.parse, "0F0 0F1 0B0 0B1".split())),))
    with refuses(PlanError, "action", "0F1@0"):
        lower(plan)


def test_messages_may_be_used_in_another_order_than_the_senders():
    # Rank 1 receives micro-batch 1 of stage 0 before micro-batch 0, which rank 0 sends first.
    plan = interleaved(2, 2)
    plan = edited(plan, (" 1RA1@0", ""), (" 1RA0@0", " 1RA1@0 1RA0@0"))
    check(replace(plan, send_slots=2))
    with refuses(PlanError, "plan", "interleaved"):
        check(replace(plan, send_slots=1))


def test_memory_is_checked():
    # Each chunk keeps 5 units from F to W.
    memory = Memory((5, 5, 5, 5), limit=20)
    # Rank 0: 0F0 0F1 3F0 are 15; 3W0 10, 3F1 15.
    assert check(VEE, memory).peak_memory == (15, 20)
    assert "  peak memory (micro-batches)\n" in str(check(VEE))
    with refuses(PlanError, "memory", 2):
        check(VEE, replace(memory, activations=(5, 5)))
    for limit in (math.nan, math.inf, 0):
        with refuses(PlanError, "memory_limit"):
            check(VEE, replace(memory, limit=limit))
    with refuses(PlanError, "memory_limit", 1):
        check(inference(2, 2), Memory.in_micro_batches(inference(2, 2), 1))
    with refuses(PlanError, "action", "2F1"):
        check(VEE, replace(memory, limit=19))
    later = edited(VEE, (" 3W0", ""), (" 3W1", " 3W0 3W1"))
    assert check(later, memory).peak_memory == (20, 20)
