# SPDX-License-Identifier: Apache-2.0
"""Marks where a thread waits for other ranks; a thread without a mark computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Wait:
    """One wait of one thread; a later one is another object.

    Args:
        what: For what, in words.
    """

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what


_waits: dict[int, Wait] = {}
_joined: dict[int, int] = {}


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark that this thread waits for other ranks inside; within another mark nothing changes.

    Args:
        what: For what, in words.
    """
    mine = threading.get_ident()
    if mine in _waits:
        yield
        return
    _waits[mine] = Wait(what)
    try:
        yield
    finally:
        del _waits[mine]


@contextmanager
def joining(thread: threading.Thread | None) -> Iterator[None]:
    """Mark that this thread waits for another one of its process: it waits where that one does."""
    mine = threading.get_ident()
    if thread is None or thread.ident in (None, mine):
        yield
        return
    _joined[mine] = thread.ident
    try:
        yield
    finally:
        del _joined[mine]


def wait_of(thread: int | None) -> Wait | None:
    """Return what a thread waits for; None if it computes."""
    return _waits.get(_joined.get(thread, thread)) if thread is not None else None
