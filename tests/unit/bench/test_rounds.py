# SPDX-License-Identifier: Apache-2.0
"""Turns, and what lies inside the measured time."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from wavemare.bench import rounds
from wavemare.bench.request import PipelineRequest
from wavemare.bench.runner import Runner
from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import Action, Kind

STOCK, OURS, BOUND = "deepspeed-1f1b", "wavemare-pipemare", "no-communication-bound"


class FakeRunner(Runner):
    """Steps take the times of a list; what is done goes to a log that all share."""

    def __init__(self, world, name, seconds):
        self.world = world
        self.name = name
        self.seconds = itertools.cycle(seconds)
        self.recorder = self
        self.events = []

    def step(self):
        self.world.log.append(self.name)
        start = self.world.now
        self.world.now += next(self.seconds)
        self.events.append(Event(Action(Kind.FORWARD, 0, 0), start, start + 0.25))
        self.events.append(Event(Action(Kind.STEP, 0, 0), start, start + 0.125))

    def settle(self):
        self.world.log.append(f"{self.name} settles")
        self.world.now += 1000

    def take(self):
        events, self.events = self.events, []
        return events


@pytest.fixture
def world(monkeypatch):
    """One rank with a clock of its own."""
    made = SimpleNamespace(now=0.0, log=[])
    monkeypatch.setattr(torch.distributed, "barrier", lambda: made.log.append("barrier"))
    return made


def test_exactly_the_steps_in_the_middle_are_timed(world):
    request = PipelineRequest(stages=2, micro_batches=(2,), rounds=1, steps_per_round=3)
    # Two steps to fill, three that count, one behind; the same again in the second round.
    runner = FakeRunner(world, "ours", [100.0, 100.0, 1.0, 2.0, 3.0, 100.0])
    turns = []
    (result,) = rounds.run_rounds(
        request, {(OURS, 2): runner}, turns.append, clock=lambda: world.now
    )
    key, measured = result
    assert key == (OURS, 2)
    assert measured.sample.seconds == pytest.approx(2.0)
    assert measured.sample.busy == pytest.approx((0.25, 0.125, 0.0))
    assert len(measured.events) == 6
    assert turns == [0, 1]
    assert world.log == 2 * ["barrier", *6 * ["ours"], "ours settles"]


def test_systems_take_turns_and_the_first_round_does_not_count(world):
    request = PipelineRequest(micro_batches=(4,), rounds=2, steps_per_round=1)
    runners = {(name, 4): FakeRunner(world, name, [1.0]) for name in (STOCK, OURS, BOUND)}
    ran = rounds.run_rounds(request, runners, lambda turn: None, clock=lambda: world.now)
    keys = [key[0] for key, _ in ran]
    assert keys == [OURS, BOUND, STOCK, BOUND, STOCK, OURS]
    settled = [entry.split()[0] for entry in world.log if entry.endswith("settles")]
    assert settled == [STOCK, OURS, BOUND, *keys]
