# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other processes do."""

import time

import pytest


@pytest.fixture
def wait_for():
    """Wait until something has happened."""

    def wait(condition):
        deadline = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < deadline, "this did not happen"
            time.sleep(0.02)

    return wait
