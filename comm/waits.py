# SPDX-License-Identifier: Apache-2.0
"""Marks where a thread waits for other ranks; a thread without a mark computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Wait:
    """One wait of one thread, for what is said in words; a later one is another object."""

    what: str


failing = threading.Event()
"""Set when the process ends by an error: what it does at its exit must not wait for other ranks."""

_waits: dict[int, Wait] = {}
_joined: dict[int, int] = {}


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark that this thread waits for other ranks inside; within another mark nothing changes.

    Args:
        what: For what, in words.
    """
    mine = threading.get_ident()
    outermost = mine not in _waits
    _waits.setdefault(mine, Wait(what))
    try:
        yield
    finally:
        if outermost:
            del _waits[mine]


@contextmanager
def joining(thread: threading.Thread | None) -> Iterator[None]:
    """Mark that this thread waits for another one of its process: it waits where that one does.

    A finaliser that the garbage collector runs inside may join another one meanwhile.
    """
    mine = threading.get_ident()
    before = _joined.get(mine, mine)
    _joined[mine] = before if thread is None else thread.ident or before
    try:
        yield
    finally:
        _joined[mine] = before


def wait_of(thread: int | None) -> Wait | None:
    """Return what a thread waits for; None if it computes."""
    return _waits.get(_joined.get(thread, thread)) if thread is not None else None
