# SPDX-License-Identifier: Apache-2.0
"""The steps that engines run: those of the whole plan, though a short run is made and checked."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.files import plan_of
from wavemare.pipeline.plan.orders import forward_only, one_f_one_b, pipemare, zb_h1, zbv
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action, Kind, Plan, message_of
from wavemare.pipeline.plan.run_plan import RunPlan, homes_of
from wavemare.pipeline.plan.schedules import SCHEDULES, TRAINED, build_plan

some = settings(max_examples=100, deadline=None)
shapes = {"num_stages": st.integers(1, 6), "micro_batches": st.integers(1, 40)}
options = st.fixed_dictionaries(
    {"norms": st.booleans(), "correct": st.booleans(), "slack": st.integers(0, 2)}
)


def shifted(actions, micro_batches, versions):
    return [
        Action(kind, stage, number + micro_batches, version + versions)
        for kind, stage, number, version in actions
    ]


def steps_of(actions):
    """Return the actions up to each optimizer step, and those after the last one."""
    found = [[]]
    for action in actions:
        found[-1].append(action)
        if action.kind is Kind.STEP:
            found.append([])
    return found


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
    run = RunPlan.of(config, 3, 6, clips=True)
    assert homes_of(config, 3) == run.homes == homes == tuple(run.whole.rank_of)
    check(forward_only(homes, 4))


def test_auto_keeps_its_limit_and_follows_its_costs():
    run = RunPlan.of(PipelineConfig(schedule="auto", memory_limit="0.75x"), 2, 4, clips=True)
    assert check(run.whole).peak_memory == (1.5, 1.5)
    unlike = Costs(forward_s=(8.0, 1.0, 1.0, 1.0), backward_s=1.0, weight_s=0.5)
    assert replace(run, costs=unlike).whole == automatic(2, 4, costs=unlike, memory_limit=0.75)
    with refuses(PlanError, "memory_limit", 0.4):
        RunPlan.of(PipelineConfig(schedule="auto", memory_limit="0.4x"), 2, 4, clips=True).check()


@some
@given(**shapes, options=options, steps=st.integers(1, 20), drains=st.booleans())
def test_a_run_of_pipemare_is_that_of_its_generator(
    num_stages, micro_batches, options, steps, drains
):
    run = RunPlan(num_stages, micro_batches, schedule="pipemare", **options)
    # Without an end the whole plan goes on for longer than its first stage is ahead.
    more = 0 if drains else 3 * num_stages + 1
    whole = pipemare(num_stages, micro_batches, steps + more, **options)
    sent = [Counter() for _ in range(num_stages)]
    for stage in range(num_stages):
        received = 0
        for number, window in enumerate(steps_of(whole.ranks[stage])[:steps]):
            left = steps - number if drains else None
            first = 7 + number * micro_batches
            got = run.step(stage, number, left, first=first, version=3 + number)
            assert [*got] == shifted(window, 7, 3)
            sent[stage][number] = sum(a.kind is Kind.SEND_ACTIVATION for a in window)
            unreceived = run.unreceived(stage, left)
            received += sum(a.kind is Kind.RECV_ACTIVATION for a in window)
            before = sum(sent[stage - 1][step] for step in range(number + 1))
            following = (number + 1) * micro_batches
            assert [*unreceived] == [n - following for n in range(received, stage and before)]


@pytest.mark.parametrize(
    ("options", "synchronous"),
    [
        ({"warmup_steps": 2}, [True, True]),
        ({}, [False, False]),
        ({"warmup_steps": 1}, [True, False, False]),
        ({"drain_interval": 2}, [False, False, True]),
    ],
)
def test_all_norms_are_exact_between_two_empty_pipelines(options, synchronous):
    plan = pipemare(3, 2, len(synchronous), norms=True, **options)
    check(plan)
    for stage, actions in enumerate(plan.ranks):
        for window, expected in zip(steps_of(actions), synchronous, strict=False):
            kinds = {action.kind for action in window}
            assert bool(kinds & {Kind.SEND_TOTAL, Kind.RECV_TOTAL}) is expected
            assert Kind.SEND_NORM in kinds or stage == 0


def test_what_no_plan_can_be_made_of_is_refused_before_the_run():
    with refuses(PlanError, "slack", -1):
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


# A rank's part, prepared.


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_rank_receives_what_others_send_it_in_their_order(name):
    plan = build_plan(name, 4, 8, 0 if name == "inference" else 1)
    rank_of, found = plan.rank_of, []
    for rank, actions in enumerate(plan.ranks):
        own = plan.of_rank(rank)
        assert own is plan.of_rank(rank)
        assert (own.actions, own.send_slots) == (actions, plan.send_slots)
        assert own.is_split == any(a.kind is Kind.BACKWARD_INPUT for row in plan.ranks for a in row)
        assert own.loads == tuple(a for a in actions if a.kind is Kind.LOAD)
        taken = [a._replace(version=-1) for a in actions if a.kind in RECEIVES]
        assert sorted(own.receives) == sorted(taken)
        for other, row in enumerate(plan.ranks):
            sent = [message_of(a) for a in row if a.kind in SENDS]
            to_it = [m for m in sent if rank_of[m[1] + SENDS[m[0]][1]] == rank]
            got = [message_of(a) for a in own.receives]
            assert [m for m in got if rank_of[m[1]] == other] == to_it
        found.append(own)
    # Of each boundary one gradient message, the last one that is sent, on both sides.
    sent = {}
    for row in plan.ranks:
        sent |= {a.stage: a.micro_batch for a in row if a.kind is Kind.SEND_GRAD}
    expected = {(Kind.SEND_GRAD, stage, m) for stage, m in sent.items()}
    expected |= {(Kind.RECV_GRAD, stage - 1, m) for stage, m in sent.items()}
    assert set().union(*(own.carriers for own in found)) == expected


# Plans that the caller gives.


def passes_of(plan, **changes):
    ranks = [[a._replace(version=-1) for a in row if a.kind in "FBIW"] for row in plan.ranks]
    return replace(plan, ranks=tuple(map(tuple, ranks)), **changes)


def test_a_plan_that_is_given_takes_the_schedules_place():
    config = PipelineConfig(schedule="pipemare")
    plan = zbv(2, 3)
    for given_plan in (plan, passes_of(plan), zbv, lambda *sizes: passes_of(zbv(*sizes))):
        run = RunPlan.of(config, 2, 3, clips=True, plan=given_plan)
        assert run.whole == zbv(2, 3)
        assert run.homes == (0, 1, 1, 0)
        assert run.send_slots == run.whole.send_slots
        assert not run.is_asynchronous
        run.check()
        assert run.step(1, 0, 1, first=6, version=2) == shifted(zbv(2, 3).ranks[1], 6, 2)


def test_a_file_is_read_where_no_plan_is_given(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(str(passes_of(zb_h1(2, 3))))
    run = RunPlan.of(PipelineConfig(schedule=f"file:{file}"), 2, 3, clips=True)
    assert run.whole == zb_h1(2, 3)
    with pytest.raises(PlanError) as info:
        RunPlan.of(PipelineConfig(schedule=f"file:{file}"), 3, 3, clips=True)
    assert info.value.key == "wavemare.pipeline.schedule"


def test_passes_alone_are_completed_also_in_lists():
    plan = passes_of(zb_h1(2, 3))
    assert plan_of(replace(plan, ranks=[list(row) for row in plan.ranks]), 2, 3) == zb_h1(2, 3)


def without(plan, *kinds):
    rows = (tuple(a for a in row if a.kind not in kinds) for row in plan.ranks)
    return replace(plan, ranks=tuple(rows))


def test_a_given_plan_gets_the_norm_that_it_lacks_and_keeps_its_order():
    plan = one_f_one_b(2, 3)
    row = [*plan.ranks[1]]
    early = row.index(Action(Kind.RECV_ACTIVATION, 1, 1, 0))
    row[early - 2 : early + 1] = row[early], *row[early - 2 : early]
    mine = replace(plan, ranks=(plan.ranks[0], tuple(row)))
    assert plan_of(without(mine, Kind.NORM), 2, 3) == mine != plan


def test_an_old_plan_with_sends_that_block_is_completed_again():
    old = replace(without(one_f_one_b(2, 3), Kind.NORM), send_slots=0)
    assert plan_of(old, 2, 3) == plan_of(Plan.parse(str(old)), 2, 3) == one_f_one_b(2, 3)


def fails(ranks, micro_batches):
    return {}[ranks]


@pytest.mark.parametrize(
    "wrong",
    [
        zbv(2, 4),
        zbv(3, 3),
        zbv(2, 3, 2),
        lambda ranks, micro_batches: zbv(ranks + 1, micro_batches),
        "zbv",
        None,
        lambda ranks, micro_batches: str(zbv(ranks, micro_batches)),
        fails,
        lambda ranks: zbv(ranks, 3),
    ],
)
def test_what_is_no_plan_of_the_pipeline_is_refused_by_its_key(wrong):
    with pytest.raises(PlanError) as info:
        plan_of(wrong, 2, 3, key="mine")
    assert info.value.key == "mine"
    if wrong is fails:
        assert isinstance(info.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "wrong",
    [
        without(zbv(2, 3), Kind.BACKWARD_WEIGHT),
        without(one_f_one_b(2, 3), Kind.SEND_GRAD),
        pipemare(2, 3, 1, norms=True),
    ],
)
def test_a_wrong_plan_is_refused_by_its_action(wrong):
    with pytest.raises(PlanError) as info:
        plan_of(wrong, 2, 3)
    assert info.value.key == "action"


def test_a_plans_own_error_is_passed_on():
    with pytest.raises(PlanError) as info:
        plan_of(lambda ranks, micro_batches: zbv(0, micro_batches), 2, 3)
    assert info.value.key == "stages"


def test_one_table_holds_what_a_configuration_may_name():
    for name in SCHEDULES:
        assert (name in TRAINED) == _is_accepted(name)
    for name in TRAINED:
        config = PipelineConfig(schedule=name)
        assert config.is_asynchronous == (name == "pipemare")
        run = RunPlan.of(config, 2, 4, clips=True)
        assert tuple(run.whole.rank_of) == run.homes


def _is_accepted(name):
    try:
        return bool(PipelineConfig.parse({"schedule": name}))
    except ConfigError:
        return False
