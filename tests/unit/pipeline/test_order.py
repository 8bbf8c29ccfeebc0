# SPDX-License-Identifier: Apache-2.0
"""The order of passes against the clock of DeepSpeed's schedule, and streams that are interrupted.

The slow twin knows nothing of limits and look-ahead. It puts every pass on a tick and sorts: stage
``s`` of ``P`` forwards micro-batch ``m`` on tick ``2m + s`` and does its backward pass on tick
``2m + 2P - 1 - s``. Whole plans, with drains, are in `test_schedules`.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.pipeline.plan.action import Kind
from wavemare.pipeline.plan.lowering import StageSchedule, ahead


def twin_order(stage, num_stages, count):
    """Return kinds and micro-batches by their ticks."""
    passes = [(2 * m + stage, Kind.FORWARD, m) for m in range(count)]
    passes += [(2 * m + 2 * num_stages - 1 - stage, Kind.BACKWARD, m) for m in range(count)]
    return [(kind, m) for _, kind, m in sorted(passes)]


def computed(actions):
    return [(a.kind, a.micro_batch) for a in actions if a.kind in {Kind.FORWARD, Kind.BACKWARD}]


@given(num_stages=st.integers(1, 16), micro_batches=st.integers(1, 64), data=st.data())
def test_without_an_end_the_stream_stays_ahead(num_stages, micro_batches, data):
    stage = data.draw(st.integers(0, num_stages - 1))
    schedule = StageSchedule(stage, num_stages, micro_batches)
    got = []
    for step in range(3):
        got += computed(schedule.step())
        assert schedule.forwarded == (step + 1) * micro_batches + ahead(stage, num_stages)
    # The clock of a longer run, up to the same backward pass.
    longer = twin_order(stage, num_stages, 3 * micro_batches + num_stages)
    assert got == longer[: len(got)]


@pytest.mark.parametrize(
    ("stops", "synchronous"),
    [([2, 4], [True, True]), ([4, 4], [False, False]), ([None, 4, 6], [False, False, True])],
)
def test_a_step_is_synchronous_between_two_empty_pipelines(stops, synchronous):
    for stage in range(3):
        schedule = StageSchedule(stage, 3, 2, norms=True)
        for stop, expected in zip(stops, synchronous, strict=True):
            kinds = {action.kind for action in schedule.step(stop)}
            assert bool(kinds & {Kind.SEND_TOTAL, Kind.RECV_TOTAL}) is expected
            assert Kind.SEND_NORM in kinds or stage == 0
