# SPDX-License-Identifier: Apache-2.0
"""The command line in this process, and waiting for what other processes do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from wavemare.cli import main


class Answer(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def wavemare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Run the ``wavemare`` command as a terminal does, but in this process."""

    def run(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["wavemare", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Answer(code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Wait until something has happened."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "this did not happen"
            time.sleep(0.02)

    return wait
