# SPDX-License-Identifier: Apache-2.0
"""The first step after a restart says how long the restart has taken."""

import re
import time

import pytest

from wavemare.engine.observe.restarts import reached, tell_first_step


def numbers(line):
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", line)]


def test_a_restart_is_told_once_with_its_parts(monkeypatch, capsys):
    now = time.time()
    monkeypatch.setenv("WAVEMARE_RESTARTED", f"{now - 100} {now - 90}")
    tell_first_step(31)
    tell_first_step(32)
    [line] = capsys.readouterr().err.splitlines()
    assert numbers(line) == pytest.approx([31, 100, 10, 90], abs=2)


def test_the_parts_of_a_restart_add_up(monkeypatch, capsys):
    now = time.time()
    monkeypatch.setenv("WAVEMARE_RESTARTED", f"{now - 100} {now - 90}")
    for place in ("imports", "engine", "load", "loaded"):
        reached(place)
        time.sleep(0.2)
    tell_first_step(31)
    [line] = capsys.readouterr().err.splitlines()
    _, total, *parts = numbers(line)
    assert len(parts) == 6
    assert sum(parts) == pytest.approx(total, abs=0.5)
    assert min(parts[2:]) >= 0.1


def test_a_first_start_is_none(monkeypatch, capsys):
    monkeypatch.delenv("WAVEMARE_RESTARTED", raising=False)
    reached("load")
    tell_first_step(1)
    assert capsys.readouterr().err == ""
