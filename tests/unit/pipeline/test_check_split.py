# SPDX-License-Identifier: Apache-2.0
"""Checks of plans with homes and split passes: named refusals, and a slow twin for the rest."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.check import Memory, check
from wavemare.pipeline.plan.chunked import interleaved, zb_h1, zbv
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action, Kind, Plan


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
        ([(" 3W1", "")], "'0R1': 3W1 does not come before it"),
        ([(" 3W0", " 3B0")], "'3B0': this backward pass is whole in one place and split in"),
        ([(" 3I0", " 3B0")], "'3W0': this backward pass is whole in one place and split in"),
        ([(" 3I0", " 3I0 3I0")], "'3I0': it is done a second time"),
        ([(" 0F1", "")], "'0SA1': 0F1 does not come before it"),
        # Order, also where a boundary has no message.
        ([(" 1F0 2F0", " 2F0 1F0")], "'2F0': 1F0 does not come before it"),
        ([(" 2I0", " "), (" 1I0", " 1I0 2I0")], "'2W0': 2I0 does not come before it"),
        ([(" 2I1 2W1 1I1 1SG1", " 1I1 1SG1 2I1 2W1")], "'1I1': 2I1 does not come before it"),
        ([(" 3F0 3I0", " 3I0 3F0")], "'3I0': 3F0 does not come before it"),
        ([(" 0I0 0W0", " 0W0 0I0")], "'0W0': 0I0 does not come before it"),
        # The order of the gradients of the weights.
        (
            [(" 0W0", ""), (" 0W1", " 0W1 0W0")],
            r"'0W1': the stage's next gradients .* are those of 0\. Add them up in the order",
        ),
        # Step.
        ([(" 0W1 0R1", " 0R1 0W1")], "'0R1': 0W1 does not come before it"),
        ([(" 0R1 0N1", " 0N1 0R1")], "'0N1': 0R1 does not come before it"),
        ([(" 0N1 0S1", " 0S1 0N1")], "'0N1': 0R1 does not come before it"),
        ([(" 0N1", "")], "'0N1': it is missing, though the plan has 1N1"),
        (
            [(" 0R1 0N1 0S1", " 3R1 3N1 3S1")],
            r"'3R1': a rank steps once, .* as stage 0\. Write 0R1",
        ),
        # Messages.
        ([(" 2SA1", "")], "'2SA1': it is missing"),
        ([(" 3RA0 3F0", " 3RA0 3RA0 3F0")], "'3RA0': it is done a second time"),
        ([(" 2F0 2SA0", " 2RA0 2F0 2SA0")], "'2RA0': this stage has nothing of this kind to do"),
        ([(" 3RA0", " 3L0 3RA0")], "'3L0': this stage has nothing of this kind to do"),
        # It ends.
        ([(" 1SG1", ""), (" 1N1", " 1N1 1SG1")], r"1N1 <-- waits for 0N1(.|\n)*in a circle"),
        (
            [("0L1 0F1 0SA1 3RA0", "3RA0 0L1 0F1 0SA1"), (" 2SA0 1RA1 1F1", " 1RA1 1F1 2SA0")],
            "circle",
        ),
        # Homes.
        ([("homes=0,1,1,0", "homes=0,1,1")], "homes = '0,1,1': these are 3 ranks for 4 stages"),
        ([("homes=0,1,1,0", "homes=0,1,0,1")], "it is on rank 0, but stage 3 is on rank 1"),
        ([(" homes=0,1,1,0", "")], r"there are 4 stages on 2 ranks\. Add homes=0,1,1,0"),
        ([("send_slots=2", "send_slots=0")], "send_slots = 0: sends that block are for plans of"),
    ],
)
def test_a_damaged_plan_is_refused_by_its_action(changes, message):
    assert check(VEE)
    with pytest.raises(PlanError, match=message):
        check(edited(VEE, *changes))


def test_no_forward_pass_comes_before_the_step_that_it_belongs_behind():
    plan = lower(Plan("late", 1, 1, 2, (tuple(map(Action.parse, "0F0 0F1 0B0 0B1".split())),)))
    with pytest.raises(
        PlanError, match="'0F1@0': it belongs to optimizer step 1, but 0 steps come"
    ):
        check(plan)


def test_messages_may_be_used_in_another_order_than_the_senders():
    # Rank 1 sends 2F0 before its gradient of stage 1, and rank 0 takes the gradient first.
    text = "0: 0F0 0F1 {} 0B1\n1: 1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1\n"
    header = "plan schedule=x stages=3 micro_batches=2 steps=1 send_slots=0 homes=0,1,1\n"
    check(lower(Plan.parse(header + text.format("0B0"))))
    ranks = Plan.parse(str(interleaved(2, 2))).ranks
    row = list(ranks[1])
    first, second = Action.parse("1RA0@0"), Action.parse("1RA1@0")
    i, j = row.index(first), row.index(second)
    row[i : j + 1] = [second, first, *(a for a in row[i:j] if a is not row[i])]
    plan = replace(interleaved(2, 2), ranks=(ranks[0], tuple(row)))
    check(replace(plan, send_slots=2))
    with pytest.raises(PlanError, match="never ends"):
        check(replace(plan, send_slots=1))


def test_memory_is_checked_in_bytes():
    # Each chunk keeps 5 bytes, of which 2 stay from I to W.
    memory = Memory((5, 5, 5, 5), (2, 2, 2, 2), limit=20)
    # Rank 0: 0F0 0F1 3F0 are 15; 3I0 12, 3W0 10, 3F1 15.
    assert check(VEE, memory).peak_memory == (15, 20)
    with pytest.raises(PlanError, match=r"'2F1': with it the rank keeps 20, .* limit is 19"):
        check(VEE, replace(memory, limit=19))
    later = edited(VEE, (" 3W0", ""), (" 3W1", " 3W0 3W1"))
    assert check(later, memory).peak_memory == (17, 20)


# The twin, by the positions of the actions.


def expected(plan, *, norms):
    """Return what must be there, and pairs of what comes before what on the same rank."""
    homes, size, head = plan.rank_of, plan.micro_batches, plan.num_stages - 1
    keys, pairs = set(), set()
    split = {(a.stage, a.micro_batch) for rank in plan.ranks for a in rank if a.kind == "I"}
    for m in range(size * plan.num_steps):
        for s in range(plan.num_stages):
            back, end = ("I", "W") if (s, m) in split else ("B", "B")
            chain = [("F", s, m), (back, s, m), *([("W", s, m)] if end == "W" else [])]
            if s == 0 or (s == head and homes[0] != homes[head]):
                pairs.add((("L", s, m), chain[0]))
            pairs |= set(pairwise(chain))
            if s < head and homes[s] == homes[s + 1]:
                above = "I" if (s + 1, m) in split else "B"
                pairs |= {(chain[0], ("F", s + 1, m)), ((above, s + 1, m), chain[1])}
            elif s < head:
                pairs |= {(chain[0], ("SA", s, m)), (("RG", s, m), chain[1])}
            if s and homes[s] != homes[s - 1]:
                pairs |= {(("RA", s, m), chain[0]), (chain[1], ("SG", s, m))}
            first = min(other for other in range(head + 1) if homes[other] == homes[s])
            step, last = m // size, (m // size + 1) * size - 1
            ends = [(kind, first, last) for kind in ("RNS" if norms else "RS")]
            pairs |= {((end, s, m), ends[0]), *pairwise(ends)}
            if step:
                pairs.add((("S", first, step * size - 1), chain[0]))
            if m:
                before = "W" if (s, m - 1) in split else "B"
                pairs.add(((before, s, m - 1), (end, s, m)))
    keys = {key for pair in pairs for key in pair}
    return keys, pairs


def ends(plan):
    """Run the plan, a rank after the other, with queues between pairs of ranks."""
    homes, done = plan.rank_of, [0] * len(plan.ranks)
    open_, taken, joined = {}, set(), {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.ranks):
            while done[rank] < len(actions):
                kind, s, m, *_ = actions[done[rank]]
                if kind in SENDS:
                    queue = open_.setdefault((rank, homes[s + SENDS[kind][1]]), [])
                    if len([x for x in queue if x not in taken]) == plan.send_slots:
                        break
                    queue.append((kind, s, m))
                if kind in RECEIVES:
                    send, distance = RECEIVES[kind]
                    message = send, s + distance, m
                    if message not in open_.get((homes[s + distance], rank), []):
                        break
                    taken.add(message)
                if kind is Kind.NORM:
                    at = joined.setdefault(m, set())
                    moved |= rank not in at
                    at.add(rank)
                    if len(at) < len(done):
                        break
                done[rank] += 1
                moved = True
    return done == [len(actions) for actions in plan.ranks]


def is_sound(plan):
    norms = {a.kind is Kind.NORM for rank in plan.ranks for a in rank} >= {True}
    where = {}
    for rank, actions in enumerate(plan.ranks):
        steps = 0
        for place, (kind, s, m, version, wave) in enumerate(actions):
            key = kind.value, s, m
            if wave or key in where or s >= plan.num_stages or plan.rank_of[s] != rank:
                return False
            if version not in (-1, steps):
                return False
            steps += kind is Kind.STEP
            where[key] = place
    keys, pairs = expected(plan, norms=norms)
    loads = [
        [a.micro_batch for a in plan.ranks[plan.rank_of[stage]] if a[:2] == (Kind.LOAD, stage)]
        for stage in (0, plan.num_stages - 1)
    ]
    return (
        where.keys() == keys
        and all(where[one] < where[other] for one, other in pairs)
        and (not loads[1] or loads[0] == loads[1])
        and ends(plan)
    )


def damaged(plan, data):
    """Return a plan with one change, which may be harmless."""
    rank = data.draw(st.integers(0, len(plan.ranks) - 1), "rank")
    actions = [*plan.ranks[rank]]
    i, j = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    how = data.draw(st.sampled_from(["drop", "repeat", "move", "swap", "near", "edit", "slots"]))
    if how == "drop":
        del actions[i]
    elif how == "repeat":
        actions.insert(j, actions[i])
    elif how == "move":
        actions.insert(j, actions.pop(i))
    elif how == "swap":
        actions[i], actions[j] = actions[j], actions[i]
    elif how == "near":
        j = min(i + 1, len(actions) - 1)
        actions[i], actions[j] = actions[j], actions[i]
    elif how == "edit":
        field = data.draw(st.sampled_from(["kind", "stage", "micro_batch", "version", "wave"]))
        values = st.sampled_from("FBIWNRS").map(Kind) if field == "kind" else st.integers(0, 4)
        actions[i] = actions[i]._replace(**{field: data.draw(values)})
    else:
        plan = replace(plan, send_slots=data.draw(st.integers(1, 3)))
    ranks = [*plan.ranks]
    ranks[rank] = tuple(actions)
    return replace(plan, ranks=tuple(ranks))


small = st.one_of(
    st.builds(zbv, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)),
    st.builds(automatic, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)),
    st.builds(zb_h1, st.integers(2, 3), st.integers(1, 4), st.integers(1, 2)),
    st.integers(1, 2).flatmap(lambda n: st.just(interleaved(2, 2 * n))),
)


@settings(max_examples=400)
@given(plan=small, changes=st.integers(0, 2), data=st.data())
def test_the_check_agrees_with_its_twin(plan, changes, data):
    for _ in range(changes):
        plan = damaged(plan, data)
    with nullcontext() if is_sound(plan) else pytest.raises(PlanError):
        check(plan)
