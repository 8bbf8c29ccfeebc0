# SPDX-License-Identifier: Apache-2.0
"""Plans by name, against DeepSpeed's own schedules, the clock and the formulas of the version map.

With ``d = P - 1 - s`` (how many micro-batches stage ``s`` is ahead) and ``M`` micro-batches per
step, micro-batch ``m`` is forwarded with version ``max(0, floor((m - d) / M))`` and its backward
pass meets version ``floor(m / M)``.
"""

import pytest
from deepspeed.runtime.pipe import schedule as stock
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.plan.orders import inference, one_f_one_b, pipemare
from wavemare.pipeline.plan.plan import COMPUTE, Kind
from wavemare.pipeline.plan.schedules import SCHEDULES, build_plan

stages = st.integers(1, 16)
sizes = st.integers(1, 64)
counts = st.integers(1, 4)
options = st.fixed_dictionaries(
    {name: st.integers(0, 3) for name in ("warmup_steps", "drain_interval")}
    | {name: st.booleans() for name in ("correct", "norms")}
)
# The oracles are slow for the largest plans; hypothesis draws them seldom.
many = settings(max_examples=50)


def passes(actions):
    return [(a.kind, a.micro_batch) for a in actions if a.kind in COMPUTE]


STOCK_KINDS = {
    stock.LoadMicroBatch: Kind.LOAD,
    stock.ForwardPass: Kind.FORWARD,
    stock.BackwardPass: Kind.BACKWARD,
    stock.SendActivation: Kind.SEND_ACTIVATION,
    stock.RecvActivation: Kind.RECV_ACTIVATION,
    stock.SendGrad: Kind.SEND_GRAD,
    stock.RecvGrad: Kind.RECV_GRAD,
    stock.ReduceGrads: Kind.REDUCE,
    stock.OptimizerStep: Kind.STEP,
}


def stock_kinds(schedule):
    # Tied weights are reduced by an instruction of their own, for which a plan has no action.
    instructions = (type(command) for commands in schedule for command in commands)
    return [STOCK_KINDS[kind] for kind in instructions if kind is not stock.ReduceTiedGrads]


def stock_actions(schedule):
    """Return kinds with micro-batches: DeepSpeed does each kind in the order of micro-batches."""
    counted = dict.fromkeys(STOCK_KINDS.values(), 0)
    actions = []
    for kind in stock_kinds(schedule):
        actions.append((kind, counted[kind]))
        counted[kind] += 1
    return actions


@many
@given(num_stages=stages, micro_batches=sizes, num_steps=st.integers(1, 2))
def test_1f1b_does_what_deepspeed_does_in_the_same_order(num_stages, micro_batches, num_steps):
    plan = one_f_one_b(num_stages, micro_batches, num_steps)
    for stage, actions in enumerate(plan.ranks):
        expected = stock_actions(stock.TrainSchedule(micro_batches, num_stages, stage))
        end = micro_batches - 1
        once_a_step = {(Kind.REDUCE, 0): (Kind.REDUCE, end), (Kind.STEP, 0): (Kind.STEP, end)}
        expected = [once_a_step.get(a, a) for a in expected]
        first = [(a.kind, a.micro_batch) for a in actions[: len(actions) // num_steps]]
        assert first[-3:] == [(Kind.REDUCE, end), (Kind.NORM, end), (Kind.STEP, end)]
        first.remove((Kind.NORM, end))
        # DeepSpeed puts some sends, which block, behind the receive that follows.
        assert sorted(first) == sorted(expected)
        for moved in ({Kind.SEND_ACTIVATION}, {Kind.RECV_GRAD}):
            kept = [[a for a in row if a[0] not in moved] for row in (first, expected)]
            assert kept[0] == kept[1]
        assert passes(actions) == [
            (kind, m + step * micro_batches)
            for step in range(num_steps)
            for kind, m in expected
            if kind in COMPUTE
        ]


@many
@given(num_stages=stages, micro_batches=sizes)
def test_inference_forwards_as_deepspeed_does(num_stages, micro_batches):
    plan = inference(num_stages, micro_batches)
    for stage, actions in enumerate(plan.ranks):
        expected = stock_actions(stock.InferenceSchedule(micro_batches, num_stages, stage))
        got = [(a.kind, a.micro_batch) for a in actions]
        assert sorted(got) == sorted(expected)
        for kind in {kind for kind, _ in got}:
            assert [a for a in got if a[0] is kind] == [a for a in expected if a[0] is kind]


def twin(stage, num_stages, micro_batches, drains):
    """Run one stage on the clock; return its passes with versions, and its most live activations.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        drains: For each stretch between two empty pipelines its number of optimizer steps.
    """
    events, clock, first = [], 0, 0
    for steps in drains:
        count = steps * micro_batches
        events += [(clock + 2 * m + stage, Kind.FORWARD, first + m) for m in range(count)]
        late = 2 * num_stages - 1 - stage
        events += [(clock + 2 * m + late, Kind.BACKWARD, first + m) for m in range(count)]
        clock += 2 * (count + num_stages - 1)
        first += count
    version, live, peak, result = 0, 0, 0, []
    for _, kind, micro_batch in sorted(events):
        result.append((kind, micro_batch, version))
        live += 1 if kind is Kind.FORWARD else -1
        peak = max(peak, live)
        if kind is Kind.BACKWARD and (micro_batch + 1) % micro_batches == 0:
            version += 1
    return result, peak


def stretches(num_steps, warmup_steps, drain_interval):
    """Return the steps between two empty pipelines, by walking through all steps."""
    ends = [
        step + 1
        for step in range(num_steps)
        if step < warmup_steps
        or step + 1 == num_steps
        or (drain_interval and (step + 1) % drain_interval == 0)
    ]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@many
@given(stages, sizes, counts, options)
def test_pipemare_runs_on_the_clock(num_stages, micro_batches, num_steps, options):
    plan = pipemare(num_stages, micro_batches, num_steps, **options)
    drains = stretches(num_steps, options["warmup_steps"], options["drain_interval"])
    for stage, actions in enumerate(plan.ranks):
        got = [(a.kind, a.micro_batch, a.version) for a in actions if a.kind in COMPUTE]
        expected, peak = twin(stage, num_stages, micro_batches, drains)
        assert got == expected
        assert peak <= num_stages - stage
        forwards = {m: version for kind, m, version in got if kind is Kind.FORWARD}
        corrections = [(a.micro_batch, a.version) for a in actions if a.kind is Kind.CORRECT]
        backwards = [(m, version) for kind, m, version in got if kind is Kind.BACKWARD]
        stale = [(m, forwards[m]) for m, version in backwards if forwards[m] < version]
        assert corrections == (stale if options["correct"] else [])


def test_an_unknown_name_is_answered_with_the_nearest():
    with refuses(PlanError, "schedule", "pipmare"):
        build_plan("pipmare", 2, 2, 1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("numbers", "key"),
    [
        ((0, 1, 1), "stages"),
        ((-1, 1, 1), "stages"),
        ((1, 0, 1), "micro_batches"),
        ((1, 1, -1), "steps"),
    ],
)
def test_numbers_out_of_range_are_refused(name, numbers, key):
    with pytest.raises(PlanError) as info:
        build_plan(name, *numbers)
    assert info.value.key == key
