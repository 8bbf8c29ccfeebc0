# SPDX-License-Identifier: Apache-2.0
"""Marks where a thread waits for other ranks, else it computes; and calls with a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class Wait:
    """One wait of one thread, for what is said in words; a later one is another object."""

    what: str


failing = threading.Event()
"""Set when the process ends by an error: what it does at its exit must not wait for other ranks."""
told_to_end = threading.Event()
"""Set when a launcher has told the process to end, and so knows of whatever has failed."""

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


class Call(threading.Thread, Generic[_Result]):
    """A call that may never return, in a thread of its own.

    Args:
        call: What is called; the result of one that fails is None.
    """

    def __init__(self, call: Callable[[], _Result]) -> None:
        super().__init__(name="wavemare-call", daemon=True)
        self._call = call
        self._result: _Result | None = None
        with suppress(RuntimeError):  # the interpreter ends, and starts no more threads
            self.start()

    def run(self) -> None:
        """Call it."""
        try:
            self._result = self._call()
        except Exception as error:
            logging.getLogger("wavemare").debug("a call has failed: %s", error)

    def wait(self, seconds: float) -> _Result | None:
        """Return the result; None if it has failed, or takes longer than this."""
        if self.is_alive():
            self.join(seconds)
        return self._result
