# SPDX-License-Identifier: Apache-2.0
"""Checks of plans with homes and split passes: refusals by name, messages and memory."""

import math
from dataclasses import replace

import pytest

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
    ("changes", "message"),
    [
        # Complete.
        ([(" 3I0", "")], "'3SG0': 3I0 does not come before it"),
        ([(" 3W0", " 3B0")], "'3B0': it is done a second time"),
        ([(" 3I0", " 3I0 3I0")], "'3I0': it is done a second time"),
        # Order, also where a boundary has no message.
        ([(" 1F0 2F0", " 2F0 1F0")], "'2F0': 1F0 does not come before it"),
        ([(" 2I1 2W1 1I1 1SG1", " 1I1 1SG1 2I1 2W1")], "'1I1': 2I1 does not come before it"),
        ([(" 0I0 0W0", " 0W0 0I0")], "'0W0': 0I0 does not come before it"),
        # The order of the gradients of the weights.
        (
            [(" 0W0", ""), (" 0W1", " 0W1 0W0")],
            r"'0W1': the stage's next gradients .* are those of 0\. Add them up in the order",
        ),
        # Step.
        ([(" 0W1 0R1", " 0R1 0W1")], "'0R1': 0W1 does not come before it"),
        ([(" 0N1 0S1", " 0S1 0N1")], "'0S1': 0N1 does not come before it"),
        (
            [(" 0R1 0N1 0S1", " 3R1 3N1 3S1")],
            r"'3R1': a rank steps once, .* as stage 0\. Write 0R1",
        ),
        # Messages.
        ([(" 2SA1", "")], "'2SA1': it is missing"),
        ([(" 3RA0 3F0", " 3RA0 3RA0 3F0")], "'3RA0': it is done a second time"),
        ([(" 2F0 2SA0", " 2RA0 2F0 2SA0")], "'2RA0': this stage has nothing of this kind to do"),
        # It ends.
        ([(" 1SG1", ""), (" 1N1", " 1N1 1SG1")], r"1N1 <-- waits for 0N1(.|\n)*in a circle"),
        (
            [("0L1 0F1 0SA1 3RA0", "3RA0 0L1 0F1 0SA1"), (" 2SA0 1RA1 1F1", " 1RA1 1F1 2SA0")],
            "circle",
        ),
        # Homes.
        (
            [("homes=0,1,1,0", "homes=0,1,1")],
            r"homes = \(0, 1, 1\): these are 3 ranks for 4 stages",
        ),
        ([("homes=0,1,1,0", "homes=0,1,0,1")], "it is on rank 0, but stage 3 is on rank 1"),
        ([(" homes=0,1,1,0", "")], r"there are 4 stages, and 2 ranks\. Add homes=0,1,1,0"),
        ([("homes=0,1,1,0", "homes=0,,1,0")], "homes = '': it is not a whole number"),
        # What only plans have that are never empty, or waves.
        ([(" 0I0", " 0C0 0I0 0U0")], "'0C0': this stage has nothing of this kind to do"),
    ],
)
def test_a_damaged_plan_is_refused_by_its_action(changes, message):
    assert check(VEE)
    with pytest.raises(PlanError, match=message):
        check(edited(VEE, *changes))


def test_no_forward_pass_comes_before_its_own_step():
    plan = Plan("late", 1, 1, 2, (tuple(map(Action.parse, "0F0 0F1 0B0 0B1".split())),))
    with pytest.raises(PlanError, match="'0F1@0': it belongs to optimizer step 1, but 0 steps"):
        lower(plan)


def test_messages_may_be_used_in_another_order_than_the_senders():
    # Rank 1 receives micro-batch 1 of stage 0 before micro-batch 0, which rank 0 sends first.
    plan = interleaved(2, 2)
    plan = edited(plan, (" 1RA1@0", ""), (" 1RA0@0", " 1RA1@0 1RA0@0"))
    check(replace(plan, send_slots=2))
    with pytest.raises(PlanError, match="never ends"):
        check(replace(plan, send_slots=1))


def test_memory_is_checked():
    # Each chunk keeps 5 units from F to W.
    memory = Memory((5, 5, 5, 5), limit=20)
    # Rank 0: 0F0 0F1 3F0 are 15; 3W0 10, 3F1 15.
    assert check(VEE, memory).peak_memory == (15, 20)
    assert "  peak memory (micro-batches)\n" in str(check(VEE))
    with pytest.raises(PlanError, match="memory = 2: the plan has 4 stages"):
        check(VEE, replace(memory, activations=(5, 5)))
    for limit in (math.nan, math.inf, 0):
        with pytest.raises(PlanError, match=r"memory_limit = .*: it is not positive and finite"):
            check(VEE, replace(memory, limit=limit))
    with pytest.raises(PlanError, match=r"memory_limit = 1: the plan does not train"):
        check(inference(2, 2), Memory.in_micro_batches(inference(2, 2), 1))
    with pytest.raises(PlanError, match=r"'2F1': with it the rank keeps 20, .* limit is 19"):
        check(VEE, replace(memory, limit=19))
    later = edited(VEE, (" 3W0", ""), (" 3W1", " 3W0 3W1"))
    assert check(later, memory).peak_memory == (20, 20)
