# SPDX-License-Identifier: Apache-2.0
"""What an engine holds is given back, whatever of it fails."""

from types import SimpleNamespace

import pytest

from wavemare.engine.mixin import EngineMixin
from wavemare.errors import CheckpointError


class Stock:
    """Stands for DeepSpeed's engine."""

    def destroy(self):
        self.done.append("deepspeed")


class Engine(EngineMixin, Stock):
    def __init__(self, failing):
        self.done, self.failing = [], failing
        self._sparse = SimpleNamespace(close=lambda: self.do("sparse"))
        self.watchdog = SimpleNamespace(
            stop=lambda: self.do("stop"), bid_farewell=lambda: self.do("farewell")
        )

    def do(self, name):
        self.done.append(name)
        if name in self.failing:
            raise CheckpointError("checkpoint", name, "cannot be written", "Free space")

    def finish_saving(self):
        self.do("saving")


ALL = ["sparse", "farewell", "stop", "saving", "deepspeed"]


@pytest.mark.parametrize("failing", [[], *([name] for name in ALL[:4]), ["farewell", "saving"]])
def test_all_is_given_back_though_a_part_fails(failing):
    engine = Engine(failing)
    if failing:
        # The last error is raised; Python keeps those before as its context.
        with pytest.raises(CheckpointError, match=f"checkpoint = '{failing[-1]}'"):
            engine.destroy()
    else:
        engine.destroy()
    assert engine.done == ALL
