# SPDX-License-Identifier: Apache-2.0
"""The first step after a restart says how long the restart has taken."""

import re
import time

import pytest

from wavemare.engine.observe.restarts import tell_first_step


def test_a_restart_is_told_once_with_its_parts(monkeypatch, capsys):
    now = time.time()
    monkeypatch.setenv("WAVEMARE_RESTARTED", f"{now - 100} {now - 90}")
    tell_first_step(31, now - 50)
    tell_first_step(32, now - 50)
    [line] = capsys.readouterr().err.splitlines()
    found = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", line)]
    assert found == pytest.approx([31, 100, 10, 40, 50], abs=2)


def test_a_first_start_is_none(monkeypatch, capsys):
    monkeypatch.delenv("WAVEMARE_RESTARTED", raising=False)
    tell_first_step(1, time.time())
    assert capsys.readouterr().err == ""
