# SPDX-License-Identifier: Apache-2.0
"""A clock and an end of the process for tests of the watchdog."""

import threading
import time

import pytest


def threads(name):
    return [each for each in threading.enumerate() if each.name == name]


class Clock:
    """Seconds pass when the test says so. Counts how often the watchdog asks for the time."""

    def __init__(self):
        self.now, self.asked = 1000.0, 0
        self.meanwhile = lambda: None  # what the other ranks do in a second

    def __call__(self):
        if threading.current_thread().name == "wavemare-watchdog":
            self.asked += 1
        return self.now

    def let_it_look(self):
        """Wait until the watchdog has counted and heard the others since this call, or ended."""
        self.meanwhile()
        deadline = time.monotonic() + 300
        for _ in range(2):  # the second time it hears what the store has answered
            before = self.asked
            while self.asked < before + 3 and threads("wavemare-watchdog"):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            for thread in threads("wavemare-call"):
                if thread.is_alive():  # it has been started
                    thread.join(300)

    def spend(self, seconds):
        """Let time pass in steps that are too short for a suspended process."""
        for _ in range(seconds):
            self.now += 1
            self.let_it_look()

    def spend_until(self, happens):
        """Let time pass until something is so, whatever the watchdog does meanwhile."""
        deadline = time.monotonic() + 300
        while not happens():
            assert time.monotonic() < deadline
            self.now += 1
            time.sleep(0.02)


class Ended:
    """Takes the place of the end of the process."""

    def __init__(self):
        self.codes = []
        self.event = threading.Event()

    def __call__(self, code):
        self.codes.append(code)
        self.event.set()

    def wait(self):
        assert self.event.wait(300)
        return self.codes


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leaving():
    return Ended
