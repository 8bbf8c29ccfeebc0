# SPDX-License-Identifier: Apache-2.0
"""The first step after a restart says how long the restart has taken."""

import re
import time

import pytest

from wavemare.engine.observe.restarts import tell_first_step


def test_a_restart_is_told_once_with_its_parts(monkeypatch, capsys):
    now = time.time()
    monkeypatch.setenv("WAVEMARE_DIED_AT", str(now - 1e6))
    tell_first_step(31, now - 50.0)
    tell_first_step(32, now - 50.0)
    [line] = capsys.readouterr().err.splitlines()
    step, whole, start, setup, rest = map(float, re.findall(r"-?\d+(?:\.\d+)?", line))
    assert step == 31
    assert whole == pytest.approx(1e6, abs=5)
    assert rest == pytest.approx(50, abs=5)
    assert start + setup + rest == pytest.approx(whole, abs=0.2)


def test_a_first_start_is_none(monkeypatch, capsys):
    monkeypatch.delenv("WAVEMARE_DIED_AT", raising=False)
    tell_first_step(1, time.time())
    assert capsys.readouterr().err == ""
