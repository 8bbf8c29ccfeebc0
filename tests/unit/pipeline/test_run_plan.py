# SPDX-License-Identifier: Apache-2.0
"""The steps that engines run: those of the whole plan, though a short run is made and checked."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.chunked import forward_only, zb_h1
from wavemare.pipeline.plan.lowering import StageSchedule, overlap_forward_backward
from wavemare.pipeline.plan.plan import Action, Kind
from wavemare.pipeline.plan.run_plan import RunPlan, homes_of
from wavemare.pipeline.plan.schedules import one_f_one_b, overlapped_one_f_one_b

some = settings(max_examples=100, deadline=None)
shapes = {"num_stages": st.integers(1, 6), "micro_batches": st.integers(1, 40)}
options = st.fixed_dictionaries(
    {"norms": st.booleans(), "correct": st.booleans(), "slack": st.integers(0, 2)}
)


def shifted(actions, micro_batches, versions):
    return [
        Action(kind, stage, number + micro_batches, version + versions, wave)
        for kind, stage, number, version, wave in actions
    ]


@some
@given(**shapes)
def test_a_step_of_1f1b_is_that_of_its_generator(num_stages, micro_batches):
    shape = num_stages, micro_batches
    for overlap, make in ((False, one_f_one_b), (True, overlapped_one_f_one_b)):
        config = PipelineConfig(overlap_forward_backward=overlap)
        run = RunPlan.of(config, *shape, clips=True)
        rows = (tuple(run.step(stage, 0, 1)) for stage in range(num_stages))
        assert tuple(rows) == make(*shape).ranks


@some
@given(**shapes)
def test_a_planned_schedule_is_proved_and_run_with_all_micro_batches(num_stages, micro_batches):
    config = PipelineConfig(schedule="zb-h1")
    whole = RunPlan.of(config, num_stages, micro_batches, clips=True).whole
    assert whole == zb_h1(num_stages, micro_batches)
    assert check(whole).peak_activations == (min(num_stages, micro_batches),) * num_stages


@pytest.mark.parametrize(
    ("settings", "homes"),
    [
        ({"schedule": "1f1b"}, (0, 1, 2)),
        ({"schedule": "interleaved"}, (0, 1, 2, 0, 1, 2)),
        ({"schedule": "interleaved", "chunks": 3}, (0, 1, 2) * 3),
        ({"schedule": "zbv"}, (0, 1, 2, 2, 1, 0)),
        ({"schedule": "auto"}, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_stages_are_where_the_schedule_has_them(settings, homes):
    config = PipelineConfig.parse(settings)
    assert homes_of(config, 3) == homes == tuple(RunPlan.of(config, 3, 6, clips=True).whole.rank_of)
    check(forward_only(homes, 4))


def test_auto_keeps_its_limit_and_follows_its_costs():
    run = RunPlan.of(PipelineConfig(schedule="auto", memory_limit="0.75x"), 2, 4, clips=True)
    assert check(run.whole).peak_memory == (1.5, 1.5)
    unlike = Costs(forward_s=(8.0, 1.0, 1.0, 1.0), backward_s=1.0, weight_s=0.5)
    assert replace(run, costs=unlike).whole == automatic(2, 4, costs=unlike, memory_limit=0.75)
    with pytest.raises(PlanError, match=r"memory_limit = 0\.4.*Give 0\.5 or more"):
        RunPlan.of(PipelineConfig(schedule="auto", memory_limit="0.4x"), 2, 4, clips=True).check()


@some
@given(
    **shapes, options=options, pairs=st.booleans(), steps=st.integers(1, 20), drains=st.booleans()
)
def test_a_run_of_pipemare_is_that_of_its_generator(
    num_stages, micro_batches, options, pairs, steps, drains
):
    run = RunPlan(num_stages, micro_batches, schedule="pipemare", overlap=pairs, **options)
    sent = [Counter() for _ in range(num_stages)]
    for stage in range(num_stages):
        schedule, received = StageSchedule(stage, num_stages, micro_batches, **options), 0
        for number in range(steps):
            left = steps - number if drains else None
            window = schedule.step(steps * micro_batches if drains else None)
            expected = shifted(overlap_forward_backward(window) if pairs else window, 7, 3)
            first = 7 + number * micro_batches
            assert run.step(stage, number, left, first=first, version=3 + number) == expected
            sent[stage][number] = sum(a.kind is Kind.SEND_ACTIVATION for a in window)
            unreceived = run.unreceived(stage, left)
            received += sum(a.kind is Kind.RECV_ACTIVATION for a in window)
            before = sum(sent[stage - 1][step] for step in range(number + 1))
            following = (number + 1) * micro_batches
            assert [*unreceived] == [n - following for n in range(received, stage and before)]


def test_what_no_plan_can_be_made_of_is_refused_before_the_run():
    with pytest.raises(PlanError, match="slack"):
        RunPlan(2, 8, schedule="pipemare", slack=-1).check()


@pytest.mark.parametrize("micro_batches", [1, 64, 256])
def test_long_runs_are_proved_by_a_part_of_them(micro_batches):
    for num_stages in (1, 2, 16):
        RunPlan(num_stages, micro_batches).check()
        run = RunPlan(num_stages, micro_batches, schedule="pipemare", slack=1)
        run.check(warmup_steps=10**6, drain_interval=10**6)


@pytest.mark.parametrize(
    ("mode", "correct"), [("auto", True), ("exact", True), ("off", False), ("predict", False)]
)
def test_the_settings_that_change_a_plan_are_taken(mode, correct):
    settings = {"discrepancy_correction": {"mode": mode}, "slack": 2}
    config = PipelineConfig.parse({"schedule": "pipemare", "pipemare": settings})
    expected = RunPlan(4, 8, schedule="pipemare", norms=True, correct=correct, slack=2)
    assert RunPlan.of(config, 4, 8, clips=True) == expected
    without = RunPlan(4, 8, schedule="pipemare", correct=correct, slack=2)
    assert RunPlan.of(config, 4, 8, clips=False) == without
