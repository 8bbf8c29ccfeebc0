# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, and how it is put on a timeline of each wave."""

from wavemare.bench.wave.record import COST_KINDS, StepRecorder, median_seconds
from wavemare.bench.wave.trace import wave_timelines
from wavemare.pipeline.action import Action, Kind
from wavemare.pipeline.timeline import Event


def test_passes_are_told_from_waits() -> None:
    times = iter([0.0, 1.0, 1.5, 4.0, 5.0, 7.0])
    recorder = StepRecorder(clock=lambda: next(times))
    for kind in (Kind.FORWARD, Kind.SUM_OUTPUT, Kind.BACKWARD):
        with recorder.record(Action(kind, 0, 0)):
            pass
    assert recorder.compute_s == 3.0
    assert recorder.waiting_s == 2.5
    assert [event.action.kind for event in recorder.events] == [
        Kind.FORWARD,
        Kind.SUM_OUTPUT,
        Kind.BACKWARD,
    ]


def test_each_wave_has_a_timeline_on_one_clock() -> None:
    first = Event(Action(Kind.FORWARD, 0, 0, wave=0), 10.0, 11.0)
    hidden = Event(Action(Kind.SUM_OUTPUT, 0, 0, wave=0), 11.0, 12.5)
    second = Event(Action(Kind.FORWARD, 0, 1, wave=1), 11.0, 12.0)
    tick, tock = wave_timelines([second, hidden, first])
    assert tick.title == "tick, measured"
    assert tick.ranks == ((Event(first.action, 0.0, 1.0), Event(hidden.action, 1.0, 2.5)),)
    assert tock.ranks == ((Event(second.action, 1.0, 2.0),),)


def test_costs_are_medians_of_each_segment() -> None:
    events = [
        Event(Action(Kind.FORWARD, 1, micro_batch), 0.0, seconds)
        for micro_batch, seconds in enumerate((1.0, 9.0, 2.0))
    ]
    events.append(Event(Action(Kind.SUM_GRADIENT, 0, 0), 3.0, 3.5))
    found = dict(zip(COST_KINDS, median_seconds(events, 2), strict=True))
    assert found == {
        Kind.FORWARD: [0.0, 2.0],
        Kind.BACKWARD: [0.0, 0.0],
        Kind.SUM_OUTPUT: [0.0, 0.0],
        Kind.SUM_GRADIENT: [0.5, 0.0],
    }
