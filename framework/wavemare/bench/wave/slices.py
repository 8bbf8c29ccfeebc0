# SPDX-License-Identifier: Apache-2.0
"""Short time slices, so that gloo's threads do not wait behind each other for the kernel's tick.

While a peer's data are there before this rank has asked for them, gloo's network thread does not
sleep. On few cores the threads that would ask wait behind it until the next tick of the clock, up
to 4 ms at 250 Hz. A thread with a short slice runs as soon as it wakes up.
"""

from __future__ import annotations

import ctypes
import platform
import struct

__all__ = ["ask_for_short_slices"]

_SLICE_NS = 100_000
# sched_setattr(2) has no function in the C library. Its structure: size, policy, flags, nice,
# priority, runtime (the slice of ordinary threads since Linux 6.12), deadline, period.
_SYSCALL = {"x86_64": 314, "aarch64": 274}
_STRUCTURE = "=IIQiIQQQ"


def ask_for_short_slices() -> bool:
    """Ask for slices of 0.1 ms for this thread and those that it will start.

    Returns:
        Whether the kernel has taken it; older ones take it without effect.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    size = struct.calcsize(_STRUCTURE)
    attributes = struct.pack(_STRUCTURE, size, 0, 0, 0, 0, _SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, ctypes.c_char_p(attributes), 0) == 0
