# SPDX-License-Identifier: Apache-2.0
"""The list scheduler: published idle times, exhaustive optima, limits and bounds."""

import pytest

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.automatic import EQUAL_PASSES, automatic, lower_bound, search
from wavemare.pipeline.plan.check import Memory, check
from wavemare.pipeline.plan.orders import loop, one_f_one_b, passes_to_plan, vee, zb_h1, zbv


def costs(forward, backward, weight, latency=0.0, chunks=2):
    """Return the costs of each of a rank's stages; the times are those of the whole rank."""
    return Costs(
        forward_s=forward / chunks,
        backward_s=(backward + weight) / chunks,
        weight_s=weight / chunks,
        send_s=latency,
    )


# By (ranks, micro-batches): idle time over F + B + W with equal passes and 1F1B's memory, the same
# with P / 2 + 1 micro-batches, and F : B : W = 1 : 1.3 : 0.7 with 1F1B's memory.
TABLE = {
    (2, 2): ("0.17", None, "0.22"),
    (2, 8): ("0.17", None, "0.22"),
    (4, 4): ("0.50", "0.83", "0.67"),
    (4, 8): ("0.50", "1.00", "0.65"),
    (8, 8): ("1.17", "3.00", "1.65"),
    (8, 16): ("1.17", "4.67", "1.52"),
}


@pytest.mark.parametrize("sizes", TABLE)
def test_idle_time_is_that_of_the_table(sizes):
    num_ranks, micro_batches = sizes
    cases = [((1, 1, 1), num_ranks), ((1, 1, 1), num_ranks / 2 + 1), ((1, 1.3, 0.7), num_ranks)]
    for (times, limit), expected in zip(cases, TABLE[sizes], strict=True):
        if expected is None:
            continue
        priced = costs(*times)
        plan = automatic(*sizes, costs=priced, memory_limit=limit / num_ranks)
        assert max(check(plan).peak_memory) <= limit
        step_s = simulate(plan, priced).makespan_s
        assert f"{step_s / 3 - micro_batches:.2f}" == expected
        bound_s = lower_bound(plan.homes, micro_batches, priced, split=True)
        assert bound_s <= step_s * (1 + 1e-9)
        if times == (1, 1, 1) and limit == num_ranks:
            assert bound_s == pytest.approx(step_s)


def test_latency_and_little_memory():
    sizes, slow = (8, 8), costs(1, 1, 1, 0.1)
    idle = {
        plan.schedule: round(simulate(plan, priced).makespan_s / 3 - 8, 2)
        for plan, priced in [
            (automatic(*sizes, costs=slow), slow),
            (zbv(*sizes), slow),
            (zb_h1(*sizes), costs(1, 1, 1, 0.1, chunks=1)),
        ]
    }
    assert idle == {"auto": 2.33, "zbv": 3.27, "zb-h1": 3.2}
    equal = costs(1, 1, 1)
    plan = automatic(*sizes, costs=equal, memory_limit=3.5 / 8)
    assert simulate(plan, equal).makespan_s / 3 - 8 == pytest.approx(6)
    assert max(check(plan).peak_memory) == 3.5
    with refuses(PlanError, "memory_limit", 0.1):
        automatic(*sizes, memory_limit=0.1)
    # A loop keeps one micro-batch of each of its stages.
    with refuses(PlanError, "memory_limit", 0.5):
        search(loop(2, 2), 4, EQUAL_PASSES, 0.5)


# The optimum, by exhaustive search, for equal passes with limits P and 2 P - 1, then for
# F : B : W = 1 : 1.4 : 0.6 with latency 0.1; and how much longer the list schedule takes.
EXHAUSTIVE = [
    (loop(2, 1), 4, [13.0, 13.0, 14.2, 13.4], [1, 1, 1, 1]),
    (loop(3, 1), 3, [11.0, 11.0, 13.0, 13.0], [1, 1, 1, 1]),
    (vee(2), 3, [9.5, 9.5, 10.0, 9.6], [1, 1, 1.08, 1]),
]


@pytest.mark.parametrize(("homes", "micro_batches", "optimum", "ratio"), EXHAUSTIVE)
def test_list_schedules_are_near_the_optimum(homes, micro_batches, optimum, ratio):
    num_ranks = max(homes) + 1
    chunks = len(homes) // num_ranks
    known = [(zb_h1 if chunks == 1 else zbv)(num_ranks, micro_batches)]
    for place, times in enumerate([(1, 1, 1), (1, 1.4, 0.6, 0.1)]):
        priced = costs(*times, chunks=chunks)
        for more, limit in enumerate((num_ranks, 2 * num_ranks - 1)):
            passes = search(homes, micro_batches, priced, limit, known=known)
            plan = passes_to_plan("best", homes, passes, micro_batches, 1)
            check(plan, Memory.in_micro_batches(plan, limit))
            step_s, best = simulate(plan, priced).makespan_s, optimum[2 * place + more]
            assert round(step_s / best, 2) == round(ratio[2 * place + more], 2)
            assert lower_bound(homes, micro_batches, priced, split=True) <= best + 0.05


def test_times_may_differ_by_stage():
    # A head that is slow on rank 0: V's last stage.
    unlike = Costs((1.0, 1.0, 1.0, 3.0), (2.0, 2.0, 2.0, 6.0), weight_s=(1.0, 1.0, 1.0, 2.0))
    plan = automatic(2, 4, costs=unlike)
    bound_s = lower_bound(plan.homes, 4, unlike, split=True)
    assert bound_s == 4 * (1 + 3 + 2 + 6)  # rank 0's work
    assert simulate(plan, unlike).makespan_s <= simulate(zbv(2, 4), unlike).makespan_s
    assert bound_s <= simulate(plan, unlike).makespan_s


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_any_number_of_micro_batches_is_scheduled(num_ranks, micro_batches):
    plan = automatic(num_ranks, micro_batches, 2)
    most = max(check(plan).peak_memory)
    assert most <= max(check(one_f_one_b(num_ranks, micro_batches)).peak_activations)
    if micro_batches == 1:  # the way of one micro-batch is the bound
        slow = costs(1, 1.5, 0.5, 0.25)
        step_s = simulate(automatic(num_ranks, 1, costs=slow), slow).makespan_s
        way = num_ranks * (1 + 1.5) + 4 * (num_ranks - 1) * 0.25 + 0.5 / 2
        expected = pytest.approx(max(way, 3) if num_ranks == 1 else way)
        assert step_s == lower_bound(plan.homes, 1, slow, split=True) == expected
