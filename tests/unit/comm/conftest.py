# SPDX-License-Identifier: Apache-2.0
"""Modules as they are where numba is not installed, and a network of one rank."""

import importlib
import sys
from pathlib import Path

import pytest

import wavemare.comm
from wavemare.comm.transport.base import Transport

sys.path.append(str(Path(__file__).parent / "kernels" / "programs"))


@pytest.fixture
def without_numba(monkeypatch):
    """Import a module of the package anew, as where numba is not installed."""

    def load(name):
        monkeypatch.setattr(wavemare, "comm", wavemare.comm)  # put back at the end
        monkeypatch.setitem(sys.modules, "numba", None)
        for loaded in [name for name in sys.modules if name.startswith("wavemare.comm")]:
            monkeypatch.delitem(sys.modules, loaded)
        return importlib.import_module(name)

    return load


@pytest.fixture(params=["numba", "without numba"])
def imported(request):
    """Import a module of the package, with numba or as where it is not installed."""
    if request.param == "numba":
        return importlib.import_module
    return request.getfixturevalue("without_numba")


class Alone(Transport):
    """A network of one rank."""

    name, rank, size, timeout_s, host = "none", 0, 1, 1.0, "here"
    world_ranks = (0,)

    def begin(self):
        return self

    def wait(self):
        pass

    def receive_any(self, tensor):
        raise AssertionError

    def reduces(self, dtype):
        return True

    def _all_reduce(self, flat):
        pass

    def split(self, colour):
        return self

    def close(self):
        pass


@pytest.fixture
def alone():
    return Alone()
