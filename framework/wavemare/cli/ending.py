# SPDX-License-Identifier: Apache-2.0
"""Ending the launcher and its processes after a signal: by a checkpoint, or at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

__all__ = ["end_job"]

_SECONDS_TO_END = 10.0
# For the rest of a step, two more or three, and a checkpoint.
_SECONDS_TO_STOP = 120.0
_STARTER = "deepspeed.launcher.launch"


def end_job(
    launcher: subprocess.Popen[bytes],
    received: Sequence[int],
    seconds_to_stop: float = _SECONDS_TO_STOP,
) -> int:
    """End the launcher and everything that it started, by force if it takes too long.

    SIGTERM goes to the ranks alone, if there are any on this host: they save a checkpoint and
    leave, and the launcher follows. Other signals end everything.

    Args:
        launcher: Leader of a session of its own.
        received: The signals so far; another one that is added while this waits means: at once.
        seconds_to_stop: How long ranks may take to save a checkpoint and leave.

    Returns:
        The launcher's return code; the negative number of the first signal if it, or force, has
        ended the job.
    """
    processes = _family(launcher)
    if not processes:
        return launcher.wait()  # it had ended by itself
    ranks = _ranks(processes) if received[0] == signal.SIGTERM else []
    if ranks:
        # Not the launcher, which would kill them after 30 s and report a failure.
        for process in ranks:
            _tell(process, signal.SIGTERM)
    else:
        _tell_all(processes, launcher.pid, received[0])
    seconds = seconds_to_stop if ranks else _SECONDS_TO_END
    alive = _outlast(launcher, processes, received, seconds)
    for process in alive:
        _tell(process, signal.SIGKILL)
    code = launcher.wait()
    return code if ranks and not alive else -received[0]


def _tell_all(processes: list[psutil.Process], launcher: int, number: int) -> None:
    """Tell all descendants, not the launcher alone: on one host it has no handler of its own.

    It gets SIGTERM, as SIGINT would make it print a traceback; with several hosts it has a handler
    for that, which ends the remote processes.
    """
    for process in processes:
        _tell(process, signal.SIGTERM if process.pid == launcher else number)


def _outlast(
    launcher: subprocess.Popen[bytes],
    processes: list[psutil.Process],
    received: Sequence[int],
    seconds: float,
) -> list[psutil.Process]:
    """Wait until the processes have ended, and return those that have not done so in time."""
    deadline = time.monotonic() + seconds
    while True:
        launcher.poll()  # not psutil's waiting, which would take its return code
        alive = [process for process in processes if _lives(process)]
        if not alive or len(received) > 1 or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    try:
        # One that has lost its parent may stay a zombie for as long as its container runs.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _family(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the launcher and all that it started, if it has not ended and left nothing."""
    found = {}
    if launcher.poll() is None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(launcher.pid)
            found = {child.pid: child for child in [process, *process.children(recursive=True)]}
    # A scheduler that signals every process ends the launcher first and leaves orphans.
    for process in psutil.process_iter():
        if _session(process.pid) == launcher.pid:
            found.setdefault(process.pid, process)
    return [process for process in found.values() if _lives(process)]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _ranks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that the launcher's part for one host has started."""
    # "python -u -m deepspeed.launcher.launch"; pdsh has that in its command as well, further on.
    starters = {p.pid for p in processes if _STARTER in _words(p)[1:4]}
    return [process for process in processes if _parent(process) in starters]


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _tell(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it has ended, which is what was wanted
        process.send_signal(number)
