# SPDX-License-Identifier: Apache-2.0
"""Stopping a job after a signal: ranks save a checkpoint and exit, or everything is killed."""

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
# For the current step, up to three more, and a checkpoint.
_SECONDS_TO_STOP = 120.0
_POLL_S = 0.1
_STARTER = "deepspeed.launcher.launch"


def end_job(
    launcher: subprocess.Popen[bytes],
    received: Sequence[int],
    seconds_to_stop: float = _SECONDS_TO_STOP,
) -> int:
    """Stop the launcher and all its descendants, and kill those that take too long.

    SIGTERM goes to the ranks of this host alone, if there are any: they save a checkpoint and exit,
    and the launcher follows. Other signals go to all processes.

    Args:
        launcher: The launcher, which leads a session.
        received: The signals so far; a second one that arrives meanwhile kills all processes.
        seconds_to_stop: Limit for saving a checkpoint.

    Returns:
        The launcher's return code; the negative number of the first signal if the signal or a kill
        ended the job.
    """
    processes = _descendants(launcher)
    if not processes:
        return launcher.wait()
    ranks = _ranks(processes) if received[0] == signal.SIGTERM else []
    for process in ranks or processes:
        # DeepSpeed's launcher prints a traceback on SIGINT. With several hosts its handler of
        # SIGTERM ends the remote processes.
        is_launcher = process.pid == launcher.pid
        _send(process, signal.SIGTERM if is_launcher else received[0])
    deadline = time.monotonic() + (seconds_to_stop if ranks else _SECONDS_TO_END)
    while alive := [process for process in processes if _is_alive(process)]:
        if len(received) > 1 or time.monotonic() > deadline:
            break
        launcher.poll()  # psutil's own wait would take the launcher's return code
        time.sleep(_POLL_S)
    for process in alive:
        _send(process, signal.SIGKILL)
    code = launcher.wait()
    return code if ranks and not alive else -received[0]


def _descendants(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the launcher and the processes that it started, as far as they are alive."""
    found = {}
    if launcher.poll() is None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(launcher.pid)
            found = {each.pid: each for each in [process, *process.children(recursive=True)]}
    # A scheduler that signals every process ends the launcher first and leaves orphans.
    for process in psutil.process_iter():
        if _session(process.pid) == launcher.pid:
            found.setdefault(process.pid, process)
    return [process for process in found.values() if _is_alive(process)]


def _ranks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the children of DeepSpeed's launcher of this host: ranks, or their elastic agent."""
    # "python -u -m deepspeed.launcher.launch"; pdsh has these words too, further on.
    starters = {p.pid for p in processes if _STARTER in _words(p)[1:4]}
    return [process for process in processes if _parent(process) in starters]


def _is_alive(process: psutil.Process) -> bool:
    try:
        # An orphan may stay a zombie until its container ends.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


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


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it has just ended
        process.send_signal(number)
