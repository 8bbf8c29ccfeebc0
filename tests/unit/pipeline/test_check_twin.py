# SPDX-License-Identifier: Apache-2.0
"""Checks of damaged plans against a slow twin: declarative, by the positions of the actions."""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.orders import interleaved, one_f_one_b, pipemare, zb_h1, zbv
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Kind


def runs_to_its_end(plan):
    """Mark actions as done, in any order, as long as one can be."""
    homes, slots, done = plan.rank_of, plan.send_slots, [0] * len(plan.ranks)
    where = {
        action[:3]: (rank, i) for rank, row in enumerate(plan.ranks) for i, action in enumerate(row)
    }

    def reached(kind, stage, micro_batch, beyond=0):
        rank, i = where[kind, stage, micro_batch]
        return done[rank] >= i + beyond

    def is_taken(send):
        kind, step = SENDS[send.kind]
        return reached(kind, send.stage + step, send.micro_batch, 1)

    def receiver(send):
        return homes[send.stage + SENDS[send.kind][1]]

    def possible(rank, i):
        action = plan.ranks[rank][i]
        kind, stage, m, *_ = action
        if kind in SENDS:
            before = [a for a in plan.ranks[rank][:i] if a.kind in SENDS]
            pending = [a for a in before if receiver(a) == receiver(action) and not is_taken(a)]
            return len(pending) < slots
        if kind in RECEIVES:
            send, step = RECEIVES[kind]
            return reached(send, stage + step, m, 1)
        norms = [key for key in where if key[::2] == (Kind.NORM, m)]
        return kind is not Kind.NORM or all(reached(*key) for key in norms)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.ranks):
            while done[rank] < len(actions) and possible(rank, done[rank]):
                done[rank] += 1
                moved = True

    return done == [len(actions) for actions in plan.ranks]


# Plans with one stage per rank, whole passes and no `NORM`.

ONCE_A_STEP = {
    *(Kind.REDUCE, Kind.STEP),
    *(Kind.SEND_NORM, Kind.RECV_NORM, Kind.SEND_TOTAL, Kind.RECV_TOTAL),
}


def per_micro_batch(first, last):
    """Return what a stage does for each micro-batch, and pairs of what comes before what."""
    before = {Kind.LOAD} if first or last else set()
    before |= set() if first else {Kind.RECV_ACTIVATION}
    pairs = [(kind, Kind.FORWARD) for kind in before] + [(Kind.FORWARD, Kind.BACKWARD)]
    pairs += [] if first else [(Kind.BACKWARD, Kind.SEND_GRAD)]
    if not last:
        pairs += [(Kind.FORWARD, Kind.SEND_ACTIVATION), (Kind.RECV_GRAD, Kind.BACKWARD)]
    return {kind for pair in pairs for kind in pair}, pairs


def per_step(first, last):
    """Return what a stage may do for each optimizer step, and pairs of what needs what."""
    pairs = [(Kind.REDUCE, Kind.STEP)]
    if not first:
        pairs += [(Kind.REDUCE, Kind.SEND_NORM)]
        pairs += [] if last else [(Kind.RECV_NORM, Kind.SEND_NORM)]
        pairs += [] if last else [(Kind.RECV_TOTAL, Kind.SEND_TOTAL)]
    elif not last:
        pairs += [(Kind.REDUCE, Kind.SEND_TOTAL), (Kind.RECV_NORM, Kind.SEND_TOTAL)]
    norms = [Kind.RECV_NORM] * (not last) + [Kind.RECV_TOTAL] * (not first)
    return {*norms, *(kind for pair in pairs for kind in pair)}, pairs


def stage_is_sound(actions, stage, plan):
    where = {(kind, m): i for i, (kind, _, m, _) in enumerate(actions)}
    ends = [(k + 1) * plan.micro_batches - 1 for k in range(plan.num_steps)]
    everything = range(plan.micro_batches * plan.num_steps)
    place = stage == 0, stage == plan.num_stages - 1
    chain, _ = per_micro_batch(*place)
    allowed = {*chain, *per_step(*place)[0], Kind.CORRECT, Kind.RESTORE}
    return (
        len(where) == len(actions)
        and {action.kind for action in actions} <= allowed
        and all(a.micro_batch in (ends if a.kind in ONCE_A_STEP else everything) for a in actions)
        and all((kind, m) in where for kind in chain for m in everything)
        and all((Kind.STEP, end) in where for end in ends)
        and orders_are_sound(where, place, ends, everything)
        and corrections_are_sound(actions, where, [where[Kind.STEP, end] for end in ends])
    )


def orders_are_sound(where, place, ends, everything):
    never = math.inf
    _, pairs = per_micro_batch(*place)
    if any(where[one, m] > where[other, m] for one, other in pairs for m in everything):
        return False
    _, pairs = per_step(*place)
    since = -1
    for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        step = where[Kind.STEP, end]
        backwards = [where[Kind.BACKWARD, m] for m in range(start, end + 1)]
        own = {kind: i for (kind, m), i in where.items() if m == end and kind in ONCE_A_STEP}
        if backwards != sorted(backwards):
            return False
        if not since < min(backwards) < max(backwards) + 1 <= own.get(Kind.REDUCE, -1) < step:
            return False
        if any(own.get(need, never) > own[kind] for need, kind in pairs if kind in own):
            return False
        if not all(since < i <= step for i in own.values()):
            return False
        since = step
    return True


def corrections_are_sound(actions, where, steps):
    counted = [sum(step < i for step in steps) for i in range(len(actions))]
    for i, (kind, _, m, version) in enumerate(actions):
        seen = counted[where[Kind.FORWARD, m]] if kind is Kind.CORRECT else counted[i]
        if version not in (-1, seen):
            return False
        if kind is Kind.CORRECT:
            end = where.get((Kind.RESTORE, m), -1)
            inside = [(a.kind, a.micro_batch) for a in actions[i + 1 : end]]
            if end < i or (Kind.BACKWARD, m) not in inside:
                return False
            if not set(inside) <= {(k, m) for k in (Kind.RECV_GRAD, Kind.BACKWARD, Kind.SEND_GRAD)}:
                return False
        if kind is Kind.RESTORE and (Kind.CORRECT, m) not in where:
            return False
    return True


def is_sound(plan):
    """Whether the check should accept a training plan with one stage per rank."""
    for stage, actions in enumerate(plan.ranks):
        if any(a.stage != stage for a in actions):
            return False
        if not stage_is_sound(actions, stage, plan):
            return False
    for step in (1, -1):
        for stage in range(plan.num_stages):
            if not 0 <= stage + step < plan.num_stages:
                continue
            meets = {send: receive for send, (receive, way) in SENDS.items() if way == step}
            sent = [a for a in plan.ranks[stage] if a.kind in meets]
            received = [a for a in plan.ranks[stage + step] if a.kind in meets.values()]
            if [(meets[a.kind], a.micro_batch) for a in sent] != [
                (a.kind, a.micro_batch) for a in received
            ]:
                return False
    loads = [[a.micro_batch for a in actions if a.kind is Kind.LOAD] for actions in plan.ranks]
    return loads[0] == loads[-1] and plan.send_slots > 0 and runs_to_its_end(plan)


# Plans with homes, split passes or `NORM`.


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


def is_sound_and_flushes(plan):
    """Whether the check should accept a plan with homes, split passes or `NORM`."""
    norms = {a.kind is Kind.NORM for rank in plan.ranks for a in rank} >= {True}
    where = {}
    for rank, actions in enumerate(plan.ranks):
        steps = 0
        for place, (kind, s, m, version) in enumerate(actions):
            key = kind.value, s, m
            if key in where or s >= plan.num_stages or plan.rank_of[s] != rank:
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
        and plan.send_slots > 0
        and runs_to_its_end(plan)
    )


small_plans = st.one_of(
    st.builds(
        pipemare,
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 3),
        warmup_steps=st.integers(0, 1),
        norms=st.booleans(),
        correct=st.booleans(),
    ),
    st.builds(one_f_one_b, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.builds(zbv, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)),
    st.builds(automatic, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)),
    st.builds(zb_h1, st.integers(2, 3), st.integers(1, 4), st.integers(1, 2)),
    st.builds(interleaved, st.just(2), st.sampled_from([2, 4])),
)


def damaged(plan, data):
    """Return a plan with one change, which may be harmless."""
    rank = data.draw(st.integers(0, len(plan.ranks) - 1), "rank")
    actions = [*plan.ranks[rank]]
    at = st.integers(0, len(actions) - 1)
    how = data.draw(st.sampled_from(["drop", "repeat", "move", "swap", "near", "edit", "slots"]))
    i, j = data.draw(at), data.draw(at)
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
        field = data.draw(st.sampled_from(["kind", "stage", "micro_batch", "version"]))
        values = st.sampled_from(Kind) if field == "kind" else st.integers(0, 4)
        actions[i] = actions[i]._replace(**{field: data.draw(values)})
    else:
        plan = replace(plan, send_slots=data.draw(st.integers(0, 3)))
    ranks = [*plan.ranks]
    ranks[rank] = tuple(actions)
    return replace(plan, ranks=tuple(ranks))


@pytest.mark.long
@settings(max_examples=800)
@given(plan=small_plans, changes=st.integers(0, 2), data=st.data())
def test_the_check_agrees_with_its_twin(plan, changes, data):
    for _ in range(changes):
        plan = damaged(plan, data)
    accepted = is_sound_and_flushes(plan) if plan.flushes else is_sound(plan)
    with nullcontext() if accepted else pytest.raises(PlanError):
        check(plan)
