# SPDX-License-Identifier: Apache-2.0
"""Simulated timelines: closed forms, and costs that are refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import (
    Costs,
    simulate,
    utilisation,
)
from wavemare.pipeline.plan.orders import inference, one_f_one_b, pipemare
from wavemare.pipeline.plan.plan import Kind, Plan

# Multiples of 1/8 are summed exactly.
seconds = st.integers(1, 40).map(lambda number: number / 8)
some = settings(max_examples=50)


@some
@given(
    num_stages=st.integers(1, 8),
    micro_batches=st.integers(1, 16),
    num_steps=st.integers(1, 3),
    forward=seconds,
    backward=seconds,
    step=seconds,
)
def test_equal_stages_take_the_time_of_the_textbook(
    num_stages, micro_batches, num_steps, forward, backward, step
):
    costs = Costs(forward, backward, step)
    pair = forward + backward
    flushing = simulate(one_f_one_b(num_stages, micro_batches, num_steps), costs)
    # All stages but the first step while the gradients travel on.
    one_step = (micro_batches + num_stages - 1) * pair + step
    assert flushing.makespan_s == num_steps * one_step
    forwards = simulate(inference(num_stages, micro_batches), costs)
    assert forwards.makespan_s == (micro_batches + num_stages - 1) * forward
    for rank in range(num_stages):
        assert flushing.busy_s(rank) == num_steps * (micro_batches * pair + step)


def test_events_are_the_plan_without_gaps():
    plan = pipemare(3, 2, 2, norms=True, correct=True)
    timeline = simulate(plan, Costs(1.0, 2.0, 0.5, 0.25))
    assert timeline.title == "pipemare, simulated"
    durations = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.STEP: 0.5}
    durations |= dict.fromkeys((Kind.REDUCE, Kind.LOAD, Kind.CORRECT, Kind.RESTORE), 0.0)
    for events, actions in zip(timeline.ranks, plan.ranks, strict=True):
        assert tuple(event.action for event in events) == actions
        clock = 0.0
        for action, start, end in events:
            assert start == clock
            assert end - start == durations.get(action.kind, end - start)
            clock = end


def test_costs_are_those_of_the_stage():
    costs = Costs((1.0, 2.0), (4.0, 8.0), (16.0, 32.0), (64.0, 128.0))
    timeline = simulate(pipemare(2, 1, 1), costs)
    ends = [
        [event.end_s for event in events if event.end_s > event.start_s]
        for events in timeline.ranks
    ]
    # Forward, message to stage 1, forward, backward, message back, backward; steps at the end.
    assert ends[1] == [65.0, 67.0, 75.0, 107.0]
    assert ends[0] == [1.0, 203.0, 207.0, 223.0]


def test_an_empty_plan_has_an_empty_timeline():
    assert simulate(Plan("none", 1, 1, 0, ((),)), Costs(1.0, 1.0)).ranks == ((),)


@pytest.mark.parametrize("cost", [-1.0, math.inf, math.nan, "1", None, True, [1.0], (1.0, -2.0)])
@pytest.mark.parametrize("name", ["forward_s", "backward_s", "step_s", "send_s"])
def test_costs_that_are_none_are_refused(name, cost):
    with refuses(PlanError, name):
        Costs(**({"forward_s": 1.0, "backward_s": 1.0} | {name: cost}))


@pytest.mark.parametrize("costs", [(), (1.0,), (1.0, 1.0, 1.0)])
def test_costs_for_other_stages_are_refused(costs):
    with refuses(PlanError, "send_s", costs):
        simulate(one_f_one_b(2, 2), Costs(1.0, 1.0, send_s=costs))


def test_whole_numbers_are_costs_too():
    timeline = simulate(one_f_one_b(1, 1), Costs(1, 2, 3))
    assert timeline.makespan_s == 6
    assert utilisation(timeline) == (1.0,)
