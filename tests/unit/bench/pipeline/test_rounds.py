# SPDX-License-Identifier: Apache-2.0
"""Turns, and what lies inside the measured time."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from wavemare.bench.pipeline import measure
from wavemare.bench.pipeline.request import PipelineRequest
from wavemare.bench.pipeline.runner import Runner
from wavemare.bench.ranks import interleaved
from wavemare.pipeline.clock.simulate import Event
from wavemare.pipeline.plan.plan import Action, Kind


class FakeRunner(Runner):
    """Steps take the times of a list, and are noted in a log."""

    def __init__(self, world, seconds):
        self.world = world
        self.seconds = itertools.cycle(seconds)
        self.events = []

    def step(self):
        self.world.log.append("step")
        start = self.world.now
        self.world.now += next(self.seconds)
        self.events.append(Event(Action(Kind.FORWARD, 0, 0), start, start + 0.25))
        self.events.append(Event(Action(Kind.STEP, 0, 0), start, start + 0.125))

    def drain(self):
        self.world.log.append("drain")
        self.world.now += 1000

    def take(self):
        events, self.events = self.events, []
        return events


def test_exactly_the_steps_in_the_middle_are_timed(monkeypatch):
    world = SimpleNamespace(now=0.0, log=[])
    monkeypatch.setattr(torch.distributed, "barrier", lambda: world.log.append("barrier"))
    monkeypatch.setattr(measure, "device_time", lambda: world.now)
    # Two steps to fill, three that count, one behind.
    runner = FakeRunner(world, [100.0, 100.0, 1.0, 2.0, 3.0, 100.0])
    sample, events = measure.run_round(runner, steps=3, fill=1)
    assert sample.seconds == pytest.approx(2.0)
    assert sample.busy == pytest.approx((0.25, 0.125, 0.0))
    assert len(events) == 6
    assert world.log == ["barrier", *6 * ["step"], "drain"]


def test_systems_take_turns_and_warm_ups_do_not_count():
    lines = []
    request = PipelineRequest(rounds=2, warmups=1)
    turns = list(interleaved(request, ["a", "b", "c"], lines.append))
    assert [name for _, name in turns] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [timed for timed, _ in turns] == [False] * 3 + [True] * 6
    assert lines == ["warming up", "round 1 of 2", "round 2 of 2"]
