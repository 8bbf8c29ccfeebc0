# SPDX-License-Identifier: Apache-2.0
"""Gain of waves: closed forms, and a clock that moves in small ticks."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.orders import inference, one_f_one_b
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, Kind
from wavemare.pipeline.wave.gain import decide, predict, step_time, sums_of
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

some = settings(max_examples=100)
LAYERS = 32


def chain(c, layers=LAYERS, f=1.0):
    """Return costs of equal layers that sum in both directions, below a head that costs nothing."""
    sums = (c,) * layers + (0.0,)
    return Costs(
        forward_s=(f,) * layers + (0.0,),
        backward_s=(2 * f,) * layers + (0.0,),
        sum_output_s=sums,
        sum_gradient_s=sums,
    )


@pytest.mark.parametrize(
    ("c", "two", "eight", "limit"),
    [
        (0.0, 1.00, 1.00, 1.00),
        (0.1, 1.03, 1.06, 1.07),
        (0.25, 1.08, 1.14, 1.17),
        (0.5, 1.14, 1.27, 1.33),
        (1.0, 1.25, 1.53, 1.67),
    ],
)
def test_the_table_of_gains(c, two, eight, limit):
    assert (3 + 2 * c) / (2 + max(1, c)) == pytest.approx(limit, abs=0.005)
    for micro_batches, expected in ((2, two), (8, eight)):
        found = predict(chain(c), LAYERS + 1, micro_batches).gain
        # Rounded to two digits in the table.
        assert found == pytest.approx(expected, rel=0.01, abs=0.005)


@pytest.mark.long
@settings(max_examples=25)
@given(f=st.integers(1, 9), c=st.integers(0, 12))
def test_the_limit_of_many_micro_batches_is_the_closed_form(f, c):
    """Of steps of 33 and of 17 micro-batches the difference is that of 16 paired ones.

    From ``c > 2f`` on the sums of a pair, one after the other, take longer than all else.
    """
    layers = 16
    costs = chain(c, layers, f=f)
    sums = dict(zip(("sums_output", "sums_gradient"), sums_of(costs, layers + 1), strict=True))

    def steady(make, **options):
        late, soon = (simulate(make(layers + 1, m, **options), costs) for m in (33, 17))
        return (late.makespan_s - soon.makespan_s) / 16 / layers

    expected = (3 * f + 2 * c) / max(2 * f + max(f, c), 2 * c)
    assert steady(accumulation) / steady(tick_tock, **sums) == pytest.approx(expected, rel=0.04)


# The walk over two resources, against a clock that moves tick by tick.


def ticking(actions, duration, waits_for):
    """Run actions in whole ticks; return the end of each, and of all sums."""
    ends, sums, queue = {}, {}, deque()
    now, clock_free = 0, 0
    current = None
    todo = deque(actions)
    while todo or current or queue:
        if current and current[1] == now:
            action = current[0]
            ends[action] = now
            length = duration(action.kind, action.stage, summing=True)
            if length:
                queue.append((action, length))
            current = None
        if queue and clock_free <= now and queue[0][0] in ends and queue[0][0] not in sums:
            sums[queue[0][0]] = clock_free = now + queue[0][1]
        if queue and sums.get(queue[0][0]) == now:
            queue.popleft()
            continue
        if todo and not current:
            needed = waits_for(todo[0])
            pending = [action for action, _ in queue]
            if all(action not in pending for action in (needed if needed != "all" else pending)):
                action = todo.popleft()
                current = action, now + duration(action.kind, action.stage)
                continue
        now += 1
    return ends, sums


@some
@given(
    size=st.integers(1, 5),
    micro_batches=st.integers(1, 4),
    make=st.sampled_from([accumulation, in_phase, tick_tock]),
    data=st.data(),
)
def test_the_walk_is_that_of_a_slow_clock(size, micro_batches, make, data):
    lengths = st.lists(st.integers(0, 4), min_size=size, max_size=size).map(tuple)
    forward, backward, up, down = (data.draw(lengths) for _ in range(4))
    up = (*up[:-1], 0)
    costs = Costs(forward, backward, sum_output_s=up, sum_gradient_s=down)
    options = {} if make is accumulation else {"sums_output": up, "sums_gradient": down}
    plan = make(size, micro_batches, **options)

    def duration(kind, stage, summing=False):
        table = (up, down) if summing else (forward, backward)
        return dict(zip((Kind.FORWARD, Kind.BACKWARD), table, strict=True)).get(kind, [0] * size)[
            stage
        ]

    def waits_for(action):
        if action.kind is Kind.REDUCE:
            return "all"
        return [
            other
            for other in plan.ranks[0]
            if other.kind in COMPUTE
            and action.kind in COMPUTE
            and other.micro_batch == action.micro_batch
        ]

    ends, sums = ticking(plan.ranks[0], duration, waits_for)
    timeline = simulate(plan, costs)
    found = {e.action: e.end_s for e in timeline.ranks[0] if e.action.kind not in COLLECTIVES}
    assert found == ends
    assert sorted(e.end_s for e in timeline.ranks[0] if e.action.kind in COLLECTIVES) == sorted(
        sums.values()
    )
    assert timeline.collectives_s == sum(e for e in up + down) * micro_batches


def test_optimizer_steps_wait_for_all_sums():
    costs = Costs(1.0, 1.0, step_s=0.5, sum_gradient_s=(7.0, 0.0))
    timeline = simulate(tick_tock(2, 1, 2), costs)
    assert timeline.makespan_s == 2 * (4 + 7 + 0.5)


def test_sums_are_for_one_rank():
    for name in ("sum_output_s", "sum_gradient_s"):
        with refuses(PlanError, name, 0.5):
            simulate(one_f_one_b(2, 2), Costs(1.0, 2.0, **{name: 0.5}))
        with refuses(PlanError, name, -0.5):
            Costs(1.0, 2.0, **{name: -0.5})


# What to do with it.


def test_domino_takes_twice_as_many_micro_batches_of_half_the_costs_in_phase():
    whole = Costs((4.0, 1.0), (8.0, 2.0), 0.5, 0.0, (2.0, 0.0), (1.0, 3.0))
    half = Costs((2.2, 0.55), (4.4, 1.1), 0.5, 0.0, (1.0, 0.0), (0.5, 1.5))
    found, expected = predict(whole, 2, 3, split_loss=0.1).domino, predict(half, 2, 6).in_phase
    assert found == pytest.approx(expected)
    single = predict(Costs(4.0, 8.0), 2, 3, split_loss=0.5).domino
    assert single == predict(Costs(3.0, 6.0), 2, 6).in_phase


def test_step_times_are_means_over_steps():
    costs = chain(0.5, 4)
    up, down = sums_of(costs, 5)
    one, three = (tick_tock(5, 4, n, sums_output=up, sums_gradient=down) for n in (1, 3))
    assert step_time(three, costs) == pytest.approx(step_time(one, costs))
    with refuses(PlanError, "steps", 0):
        step_time(inference(5, 4), costs)


def test_tick_tock_is_used_where_it_pays():
    on, reason = decide(predict(chain(0.5), LAYERS + 1, 8))
    assert on
    assert reason == "a step is predicted 1.270 times as fast"


@pytest.mark.parametrize("c", [0.0, 0.04])
def test_and_not_where_it_does_not(c):
    on, reason = decide(predict(chain(c), LAYERS + 1, 8))
    assert not on
    assert reason.endswith("not above 1.03")
