# SPDX-License-Identifier: Apache-2.0
"""A rank as the child of a process that outlives it, and that it does not outlive."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

__all__ = ["Ending", "WardedRank", "end_with_parent"]

# For the rest of a step, two more or three, and a checkpoint.
_SECONDS_TO_STOP = 120.0
_SECONDS_TO_END = 10.0
_PR_SET_PDEATHSIG = 1
_KILLED = 128 + signal.SIGKILL
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        code: As a shell would call it, 128 + n after signal n.
        given_up: Whether it was ended because another rank had failed.
        signal: That its supervisor got, and passed on; 0 if none.
    """

    code: int
    given_up: bool = False
    signal: int = 0


class WardedRank:
    """Starts a command in a session of its own, all of which ends with the block, or this process.

    Args:
        command: Its words.
        environment: All its variables.

    Attributes:
        pid: Its process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()) if _LIBC is not None else None,  # noqa: PLW1509
        )
        self.pid = self._process.pid
        self._ending: Ending | None = None
        self._given_up = False
        self._passed_on = 0
        self._deadline = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._ending is None:
            self._kill()
            self._process.wait()

    def poll(self) -> Ending | None:
        """Return how it ended; None while it runs."""
        code = self._process.poll()
        if code is not None and self._ending is None:
            self._kill()  # what it has left, such as a data loader's processes
            code = 128 - code if code < 0 else code
            self._ending = Ending(code, self._given_up, self._passed_on)
        return self._ending

    def heed(self, received: Sequence[int]) -> None:
        """Pass on the first signal that its supervisor got; a second, or time, ends it.

        Args:
            received: All so far.
        """
        if not received or self._ending is not None:
            return
        if not self._passed_on:
            self._passed_on = received[0]
            term = self._passed_on == signal.SIGTERM  # after which it saves a checkpoint
            self._deadline = time.monotonic() + (_SECONDS_TO_STOP if term else _SECONDS_TO_END)
            self._process.send_signal(self._passed_on)
        elif len(received) > 1 or time.monotonic() > self._deadline:
            self._kill()

    def give_up(self) -> None:
        """End it because another rank has failed."""
        if self.poll() is None:
            self._given_up = True
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def end_with_parent(parent: int) -> None:
    """Have the kernel end the child when the thread that started it has gone, however it went.

    Args:
        parent: The process that forked it.
    """
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before: the kernel only tells of what comes after
        os._exit(_KILLED)
