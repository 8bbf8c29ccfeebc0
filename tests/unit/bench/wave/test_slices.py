# SPDX-License-Identifier: Apache-2.0
"""The time slice that a thread gets from the kernel."""

import ctypes
import platform
import struct
import threading

import pytest

from wavemare.bench.wave.slices import ask_for_short_slices

GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
RELEASE = tuple(map(int, platform.release().split(".")[:2])) if GETATTR else (0, 0)


def slice_ns() -> int:
    """What the kernel says of the calling thread."""
    attributes = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(GETATTR, 0, attributes, 48, 0) == 0
    return int(struct.unpack("=IIQiIQQQ", attributes.raw)[5])


@pytest.mark.skipif(
    RELEASE < (6, 12), reason="needs Linux 6.12, the first with slices of ordinary threads"
)
def test_a_thread_and_those_it_starts_get_short_slices() -> None:
    found = []

    def child() -> None:
        found.append(slice_ns())

    def parent() -> None:
        assert ask_for_short_slices()
        child()
        thread = threading.Thread(target=child)
        thread.start()
        thread.join()

    before = slice_ns()
    thread = threading.Thread(target=parent)
    thread.start()
    thread.join()
    assert found == [100_000, 100_000]
    assert slice_ns() == before
