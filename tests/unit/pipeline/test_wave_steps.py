# SPDX-License-Identifier: Apache-2.0
"""The steps that waves run: those of the whole plan, though a short one is made and checked."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.plan import Kind, Plan
from wavemare.pipeline.wave.schedule import tick_tock, tick_tock_step
from wavemare.pipeline.wave.steps import OpenSteps, checked_step, open_tick_tock

some = settings(max_examples=100, deadline=None)
shapes = {"num_segments": st.integers(2, 6), "micro_batches": st.integers(1, 11)}


def plain(actions):
    return [a._replace(version=-1) for a in actions]


@some
@given(**shapes)
def test_a_drained_step_is_that_of_its_generator(num_segments, micro_batches):
    found = checked_step(tick_tock, num_segments, micro_batches)
    assert plain(found) == plain(tick_tock_step(num_segments, micro_batches))


@some
@given(**shapes, num_steps=st.integers(1, 5))
def test_an_open_run_is_that_of_the_whole_plan(num_segments, micro_batches, num_steps):
    plan, steps = open_tick_tock(num_segments, micro_batches, num_steps)
    report = check(plan)
    assert max(report.peak_activations) <= 2
    assert max(report.max_staleness) == (num_steps > 1)
    run = OpenSteps.make(num_segments, micro_batches)
    found = [run.step(k, carries_on=k > 0) for k in range(num_steps)]
    found.append(run.closing(num_steps - 1))
    passes = (Kind.LOAD, Kind.FORWARD, Kind.BACKWARD)
    for got, expected in zip(found, steps, strict=True):
        assert [a for a in got if a.kind in passes] == [a for a in expected if a.kind in passes]


def test_the_last_micro_batch_goes_backward_in_the_next_step_of_an_open_run():
    _, (first, second, closing) = open_tick_tock(2, 2, 2)
    of_step = " ".join(str(a._replace(wave=0)) for a in second)
    assert of_step == "0B1 0R1 1R1 0L2 0F2 1F2 1B2 0B2 0L3 0F3 1F3 1B3"
    assert " ".join(str(a._replace(wave=0)) for a in first) == "0L0 0F0 1F0 1B0 0B0 0L1 0F1 1F1 1B1"
    assert str(closing[2]._replace(wave=0)) == "0B3"


def test_a_late_step_is_allowed_by_the_plan_alone():
    plan, _ = open_tick_tock(3, 2, 3)
    assert Plan.parse(str(plan)) == plan
    with pytest.raises(PlanError, match="it belongs to optimizer step 1, but 0 steps come before"):
        check(replace(plan, step_delay=0))
    late = [a for a in plan.ranks[0] if (a.kind, a.micro_batch) != (Kind.STEP, 1)]
    steps = [a for a in plan.ranks[0] if (a.kind, a.micro_batch) == (Kind.STEP, 1)]
    with pytest.raises(PlanError):
        check(replace(plan, ranks=((*late, *steps),)))
    with pytest.raises(PlanError, match="step_delay"):
        check(replace(plan, step_delay=-1))
