# SPDX-License-Identifier: Apache-2.0
"""What an engine holds is given back, whatever of it fails."""

from types import SimpleNamespace

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from support.refusals import refuses
from wavemare.engine.base import EngineMixin
from wavemare.engine.feature import Feature
from wavemare.engine.observe.progress import PROGRESS
from wavemare.errors import CheckpointError


class Stock(DeepSpeedEngine):
    """Stands for DeepSpeed's engine."""

    def destroy(self):
        self.done.append("deepspeed")


class Engine(EngineMixin, Stock):
    def __init__(self, failing=()):
        self.done, self.failing = [], failing
        self.places = []
        self._writing = SimpleNamespace(wait=lambda: self.do("saving"))
        sparse = Feature()
        sparse.close = lambda: self.do("sparse")
        self.features = (sparse,)
        self.watchdog = SimpleNamespace(release=lambda: self.do("release"))

    def do(self, name):
        self.done.append(name)
        self.places.append(PROGRESS.place)
        if name in self.failing:
            raise CheckpointError("checkpoint", name, "cannot be written", "Free space")


ALL = ["saving", "sparse", "release", "deepspeed"]


@pytest.mark.parametrize("failing", [[], *([name] for name in ALL[:3]), ["saving", "release"]])
def test_all_is_given_back_though_a_part_fails(failing):
    engine = Engine(failing)
    if failing:
        # The last error is raised; Python keeps those before as its context.
        with refuses(CheckpointError, "checkpoint", failing[-1]):
            engine.destroy()
    else:
        engine.destroy()
    assert engine.done == ALL


def test_the_watchdog_is_given_back_once():
    """DeepSpeed's destructor destroys what has been destroyed again; others may hold it."""
    engine = Engine()
    engine.destroy()
    engine.destroy()
    assert engine.done.count("release") == 1
    assert engine.done.count("saving") == 1
