"""Checks of damaged plans against a slow twin: declarative, by the positions of the actions."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.action import RECEIVES, SENDS, Kind
from wavemare.pipeline.check import check
from wavemare.pipeline.schedules import one_f_one_b, pipemare


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


def stage_is_sound(actions, stage, plan):
    first, last = stage == 0, stage == plan.num_stages - 1
    where = {a[0::2][:2] + (a.wave,): i for i, a in enumerate(actions)}
    if len(where) < len(actions):
        return False
    L, F, B, S = Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP
    chain = [L] * (first or last) + [Kind.RECV_ACTIVATION] * (not first) + [F]
    chain += [Kind.SEND_ACTIVATION] * (not last) + [Kind.RECV_GRAD] * (not last) + [B]
    chain += [Kind.SEND_GRAD] * (not first)
    before = [(k, F) for k in chain[: chain.index(F)]] + [(F, B)]
    before += [] if last else [(F, Kind.SEND_ACTIVATION), (Kind.RECV_GRAD, B)]
    before += [] if first else [(B, Kind.SEND_GRAD)]
    total = plan.micro_batches * plan.num_steps
    allowed = {*chain, Kind.CORRECT, Kind.RESTORE, Kind.REDUCE, S}
    allowed |= set() if last else {Kind.RECV_NORM, Kind.SEND_TOTAL}
    allowed |= set() if first else {Kind.SEND_NORM, Kind.RECV_TOTAL}
    ends = [(k + 1) * plan.micro_batches - 1 for k in range(plan.num_steps)]
    steps = [where.get((S, end, 0)) for end in ends]
    once = {Kind.REDUCE, S, Kind.SEND_NORM, Kind.RECV_NORM, Kind.SEND_TOTAL, Kind.RECV_TOTAL}
    if not {a.kind for a in actions} <= allowed or None in steps or steps != sorted(steps):
        return False
    if any(a.micro_batch not in (ends if a.kind in once else range(total)) for a in actions):
        return False
    for m in range(total):
        if any((k, m, 0) not in where for k in chain):
            return False
        if any(where[k, m, 0] > where[later, m, 0] for k, later in before):
            return False
    counted = [sum(step < i for step in steps) for i in range(len(actions))]
    for end, step in zip(ends, steps, strict=True):
        window = {m for (k, m, _), i in where.items() if k is B and i < step}
        if window != set(range(end + 1)):
            return False
        own = {k: i for (k, m, _), i in where.items() if m == end and k in once}
        reduced = own.get(Kind.REDUCE, math.inf)
        if max(where[B, m, 0] for m in window) > reduced:
            return False
        order = [(Kind.REDUCE, Kind.SEND_NORM), (Kind.RECV_TOTAL, Kind.SEND_TOTAL)]
        order += [] if last else [(Kind.RECV_NORM, Kind.SEND_NORM)]
        if first:
            order = [(Kind.REDUCE, Kind.SEND_TOTAL), (Kind.RECV_NORM, Kind.SEND_TOTAL)]
        if any(k in own and own.get(need, math.inf) > own[k] for need, k in order):
            return False
        since = ([-1, *steps])[ends.index(end)]
        if reduced > step or any(not since < i <= step for i in own.values()):
            return False
    return corrections_are_sound(actions, where, counted)


def corrections_are_sound(actions, where, counted):
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
    messages = [
        (
            [(SENDS[a.kind][0], a.micro_batch) for a in plan.ranks[s] if SENDS.get(a.kind, "")[1:] == (step,)],
            [(a.kind, a.micro_batch) for a in plan.ranks[s + step] if RECEIVES.get(a.kind, "")[1:] == (-step,)],
        )
        for step in (1, -1)
        for s in range(plan.num_stages)
        if 0 <= s + step < plan.num_stages
    ]
    if any(sent != received for sent, received in messages):
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
    rank = data.draw(st.integers(0, plan.num_stages - 1), "rank")
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
        values = st.sampled_from(Kind) if field == "kind" else st.integers(0, 4)
        actions[i] = actions[i]._replace(**{field: data.draw(values)})
    else:
        plan = replace(plan, send_slots=data.draw(st.integers(0, 2)))
    ranks = [*plan.ranks]
    ranks[rank] = tuple(actions)
    return replace(plan, ranks=tuple(ranks))


@settings(max_examples=400, deadline=None)
@given(plan=small_plans, changes=st.integers(0, 2), data=st.data())
def test_the_check_agrees_with_its_twin(plan, changes, data):
    for _ in range(changes):
        plan = damaged(plan, data)
    try:
        check(plan)
    except PlanError as error:
        assert not is_sound(plan), error
    else:
        assert is_sound(plan)
