# SPDX-License-Identifier: Apache-2.0
"""Memory of waves: the laws of the closed forms, pacing by bytes, and a slow count of both."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.plan.plan import Kind
from wavemare.pipeline.plan.schedules import one_f_one_b
from wavemare.pipeline.wave.gain import peak_bytes
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

some = settings(max_examples=100)
bodies = st.lists(st.integers(0, 100), min_size=1, max_size=12)


def slow_curve(plan, saved_bytes):
    """Sum up, after each action, all passes that were forwarded and not backwarded."""
    curve, open_passes = [], set()
    for kind, stage, micro_batch, *_ in plan.ranks[0]:
        if kind is Kind.FORWARD:
            open_passes.add((stage, micro_batch))
        elif kind is Kind.BACKWARD:
            open_passes.remove((stage, micro_batch))
        curve.append(sum(saved_bytes[s] for s, _ in open_passes))
    return curve


def tick_tock_peak(body, pair_order="bf"):
    """Return the largest ``P(L - j) + P(j)``; for "fb" the largest ``P(L - j + 1) + P(j)``."""
    sums = [*accumulate(body, initial=0)]
    late = int(pair_order == "fb")
    # The other wave's forward passes come up from below, these from above, in reversed order.
    return max(a + b for a, b in zip(sums[late:], reversed(sums), strict=False))


@some
@given(body=bodies, head=st.integers(0, 50), micro_batches=st.integers(2, 5))
def test_closed_forms_are_what_the_plans_keep(body, head, micro_batches):
    size, saved = len(body) + 1, [*body, head]
    late = {"pair_order": "fb"}
    for plan, expected in (
        (accumulation(size, micro_batches), sum(body) + head),
        (in_phase(size, micro_batches), 2 * sum(body) + head),
        (tick_tock(size, micro_batches), max(tick_tock_peak(body), sum(body) + head)),
        (
            tick_tock(size, micro_batches, **late),
            max(tick_tock_peak(body, **late), sum(body) + head),
        ),
    ):
        assert peak_bytes(plan, saved) == max(slow_curve(plan, saved)) == expected


@some
@given(
    body=bodies,
    head=st.integers(0, 50),
    micro_batches=st.integers(1, 4),
    share=st.floats(0, 2.5),
    flags=st.data(),
    order=st.sampled_from(["bf", "fb"]),
)
def test_pacing_stays_within_its_budget(body, head, micro_batches, share, flags, order):
    size, saved, whole = len(body) + 1, [*body, head], sum(body)
    some_flags = st.just([]) | st.lists(st.booleans(), min_size=size, max_size=size)
    up, down = flags.draw(some_flags), flags.draw(some_flags)
    sums = {"sums_output": up and [*up[:-1], False], "sums_gradient": down}
    budget = int(share * whole)
    plan = tick_tock(
        size, micro_batches, **sums, pair_order=order, saved_bytes=saved, budget=budget
    )
    # One wave alone keeps all that it has, whatever the budget; the head's is there for a moment.
    assert peak_bytes(plan, saved) <= max(budget, whole, whole + head)
    between = [
        kept
        for kept, action in zip(slow_curve(plan, saved), plan.ranks[0], strict=True)
        if action.stage < size - 1
    ]
    assert max(between) <= max(budget, whole)
    unpaced = tick_tock(size, micro_batches, **sums, pair_order=order)
    if budget >= 2 * whole:
        assert plan == unpaced


def test_other_plans_and_rows_are_refused():
    with pytest.raises(PlanError, match="it has 2 ranks"):
        peak_bytes(one_f_one_b(2, 2), [1, 1])
    with pytest.raises(PlanError, match="these are 2 numbers for 3 segments"):
        peak_bytes(tick_tock(3, 2), [1, 1])
