# SPDX-License-Identifier: Apache-2.0
"""Plans on the clock, against a slow twin that relaxes all constraints until nothing changes."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.clock.clock import execute
from wavemare.pipeline.plan.orders import inference, one_f_one_b, pipemare
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action, Kind, Plan

# Multiples of 1/8 are summed exactly.
seconds = st.integers(0, 40).map(lambda number: number / 8)


def no_time(*_):
    return 0


def channels(plan):
    """Return for each channel the places of its sends and of its receives."""
    found = {}
    for rank, actions in enumerate(plan.ranks):
        for i, (kind, stage, *_) in enumerate(actions):
            if kind in SENDS:
                found.setdefault((stage, SENDS[kind][1]), ([], []))[0].append((rank, i))
            if kind in RECEIVES:
                step = -RECEIVES[kind][1]
                found.setdefault((stage - step, step), ([], []))[1].append((rank, i))
    return found


def bounds_of(plan, latency):
    """Return for each action that waits for others these, and how much later it ends."""
    bounds = {}
    for (stage, _), (sends, receives) in channels(plan).items():
        for number, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            bounds.setdefault(receive, []).append((send, latency(stage)))
            if number >= plan.send_slots:
                bounds.setdefault(send, []).append((receives[number - plan.send_slots], 0.0))
    norms = {}
    for rank, actions in enumerate(plan.ranks):
        for i, action in enumerate(actions):
            if action.kind is Kind.NORM:
                norms.setdefault(action.micro_batch, []).append((rank, i))
    for places in norms.values():  # the sum is there when the last rank has come to it
        bounds |= {place: [((rank, i - 1), 0.0) for rank, i in places] for place in places}
    return bounds


def relaxed(plan, duration, latency):
    """Return the earliest ends that meet every constraint, found by raising all from 0."""
    ends = [[0.0] * len(actions) for actions in plan.ranks]
    bounds = bounds_of(plan, latency)
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(plan.ranks):
            for i, (kind, stage, *_) in enumerate(actions):
                waits = kind in SENDS or kind in RECEIVES or kind is Kind.NORM
                own = 0.0 if waits else duration(kind, stage)
                end = own + (ends[rank][i - 1] if i else 0.0)
                for (other, j), extra in bounds.get((rank, i), []):
                    end = max(end, extra + (ends[other][j] if j >= 0 else 0.0))
                if end > ends[rank][i]:
                    ends[rank][i], changed = end, True
    return ends


plans = st.one_of(
    st.builds(
        pipemare,
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(1, 3),
        norms=st.booleans(),
        drain_interval=st.integers(0, 1),
    ).flatmap(lambda plan: st.integers(2, 3).map(lambda slots: replace(plan, send_slots=slots))),
    st.builds(one_f_one_b, st.integers(1, 5), st.integers(1, 4), st.integers(1, 2)),
    st.builds(inference, st.integers(1, 5), st.integers(1, 6)),
)


@settings(max_examples=80)
@given(plan=plans, data=st.data())
def test_times_are_the_earliest_possible(plan, data):
    kinds = [Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE, Kind.STEP]
    costs = {
        (kind, stage): data.draw(seconds) for kind in kinds for stage in range(plan.num_stages)
    }
    latencies = [data.draw(seconds) for _ in range(plan.num_stages)]

    def duration(kind, stage):
        return costs.get((kind, stage), 0.0)

    times = execute(plan, duration, latencies.__getitem__)
    assert times == relaxed(plan, duration, latencies.__getitem__)


def messages(plan_slots, *ranks):
    """Return a plan of messages alone, one stage per rank."""
    actions = tuple(tuple(map(Action.parse, rank.split())) for rank in ranks)
    return Plan("messages", len(ranks), 1, 1, actions, plan_slots)


def test_waiting_for_what_never_comes_is_told_from_a_circle():
    with refuses(PlanError, "plan", "messages") as info:
        execute(messages(1, "0SA0", "1RA0 1RA1 1F1"), no_time, no_time)
    assert "  rank 1: 1RA0 1RA1 <-- waits for 0SA1; then 1F1\n" in str(info.value)
    for actions, expected in (("0RG0", "1SG0"), ("0SA0 0SA1", "1RA0")):
        with refuses(PlanError, "plan", "messages") as info:
            execute(messages(1, actions), no_time, no_time)
        assert f" waits for {expected}; then nothing" in str(info.value)


def test_only_the_ranks_of_the_circle_are_named():
    plan = messages(1, "0RG5", "1RG0 1SA0 1SG5", "2RA0 2SG0")
    with refuses(PlanError, "plan", "messages") as info:
        execute(plan, no_time, no_time)
    assert "rank 0: 0RG5 <-- waits for 1SG5" in str(info.value)
