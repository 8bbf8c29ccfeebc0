# SPDX-License-Identifier: Apache-2.0
"""How fast links must be for a share of exposed communication, and how ranks get such links."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wavemare.bench.network import Laboratory
from wavemare.errors import LaunchError
from wavemare.files import atomic_write_text

__all__ = ["adjusted_mbit", "ask_for_links", "link_mbit", "links_on_demand", "sent_bytes"]

# Of an Ethernet frame of 1514 bytes TCP carries 1448, and links count whole frames.
_FRAMING = 1514 / 1448
_LEAST_WIRE = 0.25
_ASKED, _DONE = "links-asked.json", "links-done.json"
_POLL_S = 0.02
_TIMEOUT_S = 60.0


def sent_bytes(payload_bytes: float, ranks: int) -> float:
    """Return what each rank sends, and receives, to sum a tensor around a ring."""
    return 2 * (ranks - 1) / ranks * payload_bytes


def link_mbit(share: float, compute_s: float, sent: float) -> float:
    """Return the speed at which messages take a share of a step that does one thing at a time.

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
    """Return a speed that is nearer to a share, from what was measured at another one.

    What messages took beyond the wire's own time is taken for the same at each speed.

    Args:
        mbit: At which it was measured.
        share: That is wanted.
        sent: Bytes that a rank sends in the step.
        compute_s: Measured seconds of the step's passes.
        waiting_s: Measured seconds of its collectives.
    """
    wire_s = 8 * _FRAMING * sent / (mbit * 1e6)
    wanted_s = wire_s + compute_s * share / (1 - share) - waiting_s
    return _mbit(sent, max(wanted_s, _LEAST_WIRE * wire_s))


def _mbit(sent: float, seconds: float) -> float:
    return 8 * _FRAMING * sent / seconds / 1e6


@contextmanager
def links_on_demand(laboratory: Laboratory, folder: Path) -> Iterator[None]:
    """Let ranks change the speed of a laboratory's links by `ask_for_links`.

    Args:
        laboratory: Open.
        folder: One that the ranks see, too.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_serve, args=(laboratory, folder, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def ask_for_links(folder: Path, mbit: float | None, timeout_s: float = _TIMEOUT_S) -> None:
    """Have all links changed; one rank calls it while nothing is under way.

    Args:
        folder: That of `links_on_demand`.
        mbit: Their speed in each direction; None for as fast as they go.
        timeout_s: How long to wait for it.

    Raises:
        LaunchError: It was not done in time.
    """
    (folder / _DONE).unlink(missing_ok=True)
    atomic_write_text(folder / _ASKED, json.dumps(mbit))
    deadline = time.monotonic() + timeout_s
    while not (folder / _DONE).exists():
        if time.monotonic() > deadline:
            reason = "nobody has changed the links"
            raise LaunchError("link_mbit", mbit, reason, "Look at the output of the command")
        time.sleep(_POLL_S)


def _serve(laboratory: Laboratory, folder: Path, ended: threading.Event) -> None:
    asked = folder / _ASKED
    while not ended.wait(_POLL_S):
        if asked.exists():
            text = asked.read_text(encoding="utf-8")
            asked.unlink()
            laboratory.shape(json.loads(text))
            atomic_write_text(folder / _DONE, text)
