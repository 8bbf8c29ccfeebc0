# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Wait until something has happened."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "this did not happen"
            time.sleep(0.02)

    return wait
