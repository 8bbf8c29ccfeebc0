# SPDX-License-Identifier: Apache-2.0
"""Speeds of links at which messages take a share of a step, and short time slices."""

from __future__ import annotations

import ctypes
import platform
import struct

# Of an Ethernet frame of 1514 bytes TCP carries 1448, and links count whole frames.
_FRAMING = 1514 / 1448
_LEAST_WIRE = 0.25
_SLICE_NS = 100_000
# sched_setattr(2) has no function in the C library. Its structure: size, policy, flags, nice,
# priority, runtime (the slice of ordinary threads since Linux 6.12), deadline, period.
_SYSCALL = {"x86_64": 314, "aarch64": 274}
_STRUCTURE = "=IIQiIQQQ"


def sent_bytes(payload_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends, and receives, to sum a tensor around a ring."""
    return 2 * (ranks - 1) / ranks * payload_bytes


def link_mbit(share: float, compute_s: float, sent: float) -> float:
    """Return the speed at which messages take a share of a step without any overlap.

    Args:
        share: Of the step, above 0 and below 1: for segments of ``f`` forward, ``2f`` backward and
            ``c`` for a collective in each direction it is ``2c / (3f + 2c)``.
        compute_s: Seconds of the step's passes.
        sent: Bytes that a rank sends in the step.

    Returns:
        Mbit/s, of whole frames.
    """
    return _mbit(sent, compute_s * share / (1 - share))


def adjusted_mbit(
    mbit: float, share: float, sent: float, *, compute_s: float, waiting_s: float
) -> float:
    """Return a speed that is nearer to a share, from a measurement at another speed.

    The time of messages beyond the wire's own is assumed to be the same at each speed.

    Args:
        mbit: Speed of the measurement.
        share: The wanted share.
        sent: Bytes that a rank sends in the step.
        compute_s: Measured seconds of the step's passes.
        waiting_s: Measured seconds of its collectives.
    """
    wire_s = 8 * _FRAMING * sent / (mbit * 1e6)
    wanted_s = wire_s + compute_s * share / (1 - share) - waiting_s
    return _mbit(sent, max(wanted_s, _LEAST_WIRE * wire_s))


def _mbit(sent: float, seconds: float) -> float:
    return 8 * _FRAMING * sent / seconds / 1e6


def ask_for_short_slices() -> bool:
    """Ask the scheduler for slices of 0.1 ms for this thread and its future children.

    While a peer's data are there before this rank asks for them, gloo's network thread does not
    sleep. On few cores the asking threads then wait for the next tick of the clock, up to 4 ms at
    250 Hz. A thread with a short slice runs as soon as it wakes up.

    Returns:
        Whether the kernel has accepted it; older kernels accept it without effect.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    size = struct.calcsize(_STRUCTURE)
    attributes = struct.pack(_STRUCTURE, size, 0, 0, 0, 0, _SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, ctypes.c_char_p(attributes), 0) == 0
