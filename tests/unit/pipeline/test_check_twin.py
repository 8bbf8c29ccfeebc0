# SPDX-License-Identifier: Apache-2.0
"""Checks of damaged plans against a slow twin: declarative, by the positions of the actions."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Kind
from wavemare.pipeline.plan.schedules import one_f_one_b, pipemare


def runs_to_its_end(plan):
    """Mark actions as done, in any order, as long as one can be."""
    ends = {}
    for rank, actions in enumerate(plan.ranks):
        for i, a in enumerate(actions):
            if a.kind in SENDS:
                ends.setdefault((a.stage, SENDS[a.kind][1], "send"), []).append((rank, i))
            if a.kind in RECEIVES:
                step = -RECEIVES[a.kind][1]
                ends.setdefault((a.stage - step, step, "receive"), []).append((rank, i))
    done = [0] * len(plan.ranks)

    def possible(rank, i):
        action = plan.ranks[rank][i]
        slots = plan.send_slots
        if action.kind in SENDS:
            stage, step = action.stage, SENDS[action.kind][1]
            number = ends[stage, step, "send"].index((rank, i)) - slots
            if number < 0:
                return True
            receiver, j = ends[stage, step, "receive"][number]
            return done[receiver] >= j + (slots > 0)
        if action.kind in RECEIVES:
            step = -RECEIVES[action.kind][1]
            number = ends[action.stage - step, step, "receive"].index((rank, i))
            sender, j = ends[action.stage - step, step, "send"][number]
            return done[sender] >= j + (slots > 0)
        return True

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.ranks):
            while done[rank] < len(actions) and possible(rank, done[rank]):
                done[rank] += 1
                moved = True

    return done == [len(actions) for actions in plan.ranks]


# In these plans the twin knows neither split passes nor their norms.
SPLIT = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.NORM}

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
    where = {(kind, m, wave): i for i, (kind, _, m, _, wave) in enumerate(actions)}
    ends = [(k + 1) * plan.micro_batches - 1 for k in range(plan.num_steps)]
    everything = range(plan.micro_batches * plan.num_steps)
    place = stage == 0, stage == plan.num_stages - 1
    chain, _ = per_micro_batch(*place)
    allowed = {*chain, *per_step(*place)[0], Kind.CORRECT, Kind.RESTORE}
    return (
        len(where) == len(actions)
        and {action.kind for action in actions} <= allowed
        and all(a.micro_batch in (ends if a.kind in ONCE_A_STEP else everything) for a in actions)
        and all((kind, m, 0) in where for kind in chain for m in everything)
        and all((Kind.STEP, end, 0) in where for end in ends)
        and orders_are_sound(where, place, ends, everything)
        and corrections_are_sound(actions, where, [where[Kind.STEP, end, 0] for end in ends])
    )


def orders_are_sound(where, place, ends, everything):
    never = math.inf
    _, pairs = per_micro_batch(*place)
    if any(where[one, m, 0] > where[other, m, 0] for one, other in pairs for m in everything):
        return False
    _, pairs = per_step(*place)
    since = -1
    for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        step = where[Kind.STEP, end, 0]
        backwards = [where[Kind.BACKWARD, m, 0] for m in range(start, end + 1)]
        own = {kind: i for (kind, m, _), i in where.items() if m == end and kind in ONCE_A_STEP}
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
    for i, (kind, _, m, version, wave) in enumerate(actions):
        seen = counted[where[Kind.FORWARD, m, wave]] if kind is Kind.CORRECT else counted[i]
        if version not in (-1, seen):
            return False
        if kind is Kind.CORRECT:
            end = where.get((Kind.RESTORE, m, wave), -1)
            inside = [(a.kind, a.micro_batch) for a in actions[i + 1 : end]]
            if end < i or (Kind.BACKWARD, m) not in inside:
                return False
            if not set(inside) <= {(k, m) for k in (Kind.RECV_GRAD, Kind.BACKWARD, Kind.SEND_GRAD)}:
                return False
        if kind is Kind.RESTORE and (Kind.CORRECT, m, wave) not in where:
            return False
    return True


def is_sound(plan):
    """Whether the check should accept a training plan with one stage per rank and one wave."""
    for stage, actions in enumerate(plan.ranks):
        if any(a.stage != stage or a.wave for a in actions):
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
            if [(meets[a.kind], a.micro_batch) for a in sent] != [a[::2][:2] for a in received]:
                return False
    loads = [[a.micro_batch for a in actions if a.kind is Kind.LOAD] for actions in plan.ranks]
    return loads[0] == loads[-1] and runs_to_its_end(plan)


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
        field = data.draw(st.sampled_from(["kind", "stage", "micro_batch", "version", "wave"]))
        values = (
            st.sampled_from(sorted(set(Kind) - SPLIT)) if field == "kind" else st.integers(0, 4)
        )
        actions[i] = actions[i]._replace(**{field: data.draw(values)})
    else:
        plan = replace(plan, send_slots=data.draw(st.integers(0, 2)))
    ranks = [*plan.ranks]
    ranks[rank] = tuple(actions)
    return replace(plan, ranks=tuple(ranks))


@settings(max_examples=400)
@given(plan=small_plans, changes=st.integers(0, 2), data=st.data())
def test_the_check_agrees_with_its_twin(plan, changes, data):
    for _ in range(changes):
        plan = damaged(plan, data)
    with nullcontext() if is_sound(plan) else pytest.raises(PlanError):
        check(plan)
