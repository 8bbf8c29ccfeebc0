# SPDX-License-Identifier: Apache-2.0
"""Where a rank's time goes, on a clock that the test moves."""

import pytest

from wavemare.engine.observe.recorder import Recorder
from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.plan.plan import Action, Kind

BUSY = {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.STEP}
WAITING = {
    Kind.SEND_ACTIVATION,
    Kind.RECV_ACTIVATION,
    Kind.SEND_GRAD,
    Kind.RECV_GRAD,
    Kind.SEND_NORM,
    Kind.RECV_NORM,
    Kind.SEND_TOTAL,
    Kind.RECV_TOTAL,
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("wavemare.engine.observe.recorder.time.perf_counter", clock)
    return clock


def spend(recorder, clock, kind, seconds, micro_batch=0):
    clock.now += seconds
    recorder.add(Action(kind, 0, micro_batch), clock.now - seconds, clock.now)


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_counts_as_work_or_waiting_or_neither(clock, kind):
    recorder = Recorder()
    spend(recorder, clock, kind, 3.0)
    clock.now += 1.0
    expected = (0.75 if kind in BUSY else 0.0, 0.75 if kind in WAITING else 0.0)
    assert recorder.shares() == expected


def test_shares_are_of_the_time_since_the_last_call(clock):
    recorder = Recorder()
    spend(recorder, clock, Kind.FORWARD, 1.0)
    spend(recorder, clock, Kind.RECV_GRAD, 2.0)
    spend(recorder, clock, Kind.BACKWARD, 4.0)
    clock.now += 1.0
    assert recorder.shares() == (5 / 8, 2 / 8)
    spend(recorder, clock, Kind.STEP, 1.0)
    clock.now += 3.0
    assert recorder.shares() == (1 / 4, 0.0)
    clock.now += 2.0
    assert recorder.shares() == (0.0, 0.0)


def test_events_are_kept_on_demand_alone_and_make_a_timeline(clock):
    recorder = Recorder()
    spend(recorder, clock, Kind.FORWARD, 1.0)
    assert recorder.events == []
    recorder.keeping = True
    spend(recorder, clock, Kind.FORWARD, 2.0, micro_batch=1)
    spend(recorder, clock, Kind.LOAD, 0.5, micro_batch=2)
    assert recorder.events == [
        Event(Action(Kind.FORWARD, 0, 1), 101.0, 103.0),
        Event(Action(Kind.LOAD, 0, 2), 103.0, 103.5),
    ]
    timeline = Timeline("measured", (tuple(recorder.events),))
    assert timeline.makespan_s == 2.5
    assert timeline.busy_s(0) == 2.0
