# SPDX-License-Identifier: Apache-2.0
"""What the recorder notes."""

import itertools

from wavemare.bench.recorder import Busy, Recorder, busy_seconds
from wavemare.pipeline.action import Action, Kind
from wavemare.pipeline.timeline import Event


def test_actions_are_numbered_by_kind_and_stage() -> None:
    ticks = itertools.count()
    recorder = Recorder(2, clock=lambda: float(next(ticks)))
    forward = recorder.timed(Kind.FORWARD, 0, lambda value, *, extra: value + extra)
    mirror = recorder.timed(Kind.FORWARD, 3, lambda: None)
    step = recorder.timed(Kind.STEP, 0, lambda: None)
    assert forward(1, extra=2) == 3
    mirror()
    forward(1, extra=1)
    step()
    step()
    events = recorder.take()
    assert [(str(event.action), event.start_s, event.end_s) for event in events] == [
        ("0F0", 0.0, 1.0),
        ("3F0", 2.0, 3.0),
        ("0F1", 4.0, 5.0),
        ("0S1", 6.0, 7.0),
        ("0S3", 8.0, 9.0),
    ]
    assert recorder.take() == []
    forward(0, extra=0)
    assert str(recorder.take()[0].action) == "0F2"


def test_times_are_added_by_purpose() -> None:
    seconds = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: 2.0,
        Kind.STEP: 4.0,
        Kind.SEND_GRAD: 8.0,
        Kind.RECV_ACTIVATION: 16.0,
        Kind.LOAD: 32.0,
        Kind.REDUCE: 64.0,
    }
    events = [Event(Action(kind, 0, 0), 5.0, 5.0 + length) for kind, length in seconds.items()]
    assert busy_seconds(events) == Busy(compute_s=3.0, step_s=4.0, message_s=24.0)
    assert busy_seconds([]) == Busy(0.0, 0.0, 0.0)
