# SPDX-License-Identifier: Apache-2.0
"""Memory of waves: the laws of the closed forms, and a slow count."""

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


def tick_tock_peak(body):
    """Return the largest ``P(L - j) + P(j)``."""
    sums = [*accumulate(body, initial=0)]
    # The other wave's forward passes come up from below, these from above, in reversed order.
    return max(a + b for a, b in zip(sums, reversed(sums), strict=True))


@some
@given(body=bodies, head=st.integers(0, 50), micro_batches=st.integers(2, 5))
def test_closed_forms_are_what_the_plans_keep(body, head, micro_batches):
    size, saved = len(body) + 1, [*body, head]
    for plan, expected in (
        (accumulation(size, micro_batches), sum(body) + head),
        (in_phase(size, micro_batches), 2 * sum(body) + head),
        (tick_tock(size, micro_batches), max(tick_tock_peak(body), sum(body) + head)),
    ):
        assert peak_bytes(plan, saved) == max(slow_curve(plan, saved)) == expected


def test_other_plans_and_rows_are_refused():
    with pytest.raises(PlanError, match="it has 2 ranks"):
        peak_bytes(one_f_one_b(2, 2), [1, 1])
    with pytest.raises(PlanError, match="these are 2 numbers for 3 segments"):
        peak_bytes(tick_tock(3, 2), [1, 1])
