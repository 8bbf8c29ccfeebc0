# SPDX-License-Identifier: Apache-2.0
"""Starting a job again after its ranks have died, on the hosts that are left."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from wavemare.cli.checks.hostfile import Host
from wavemare.cli.job import Job
from wavemare.engine.launch.restart import COUNT, STARTED

__all__ = ["IN_VAIN", "repeat", "run_with_restarts"]

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SSH_SECONDS = 15.0
IN_VAIN = frozenset({2, 126, 127})
"""Exit codes of our typed errors, a shell's "cannot be run" and "not found": the next attempt would
fail alike."""


def run_with_restarts(
    job: Job, max_restarts: int, *, answers: Callable[[Host], bool] | None = None
) -> int:
    """Run a job; while it fails, start it again, at most so many times.

    Ranks learn by variables that they are a later attempt; a recipe then resumes from its newest
    checkpoint. Of several hosts, those that cannot be logged in to are left out.

    Args:
        job: What to run.
        max_restarts: How often to start again.
        answers: Whether a host can be used; by default by ssh.

    Returns:
        The exit code of the last attempt.
    """

    def run(signals: list[int]) -> int:
        return job.run(signals)

    def places() -> str:
        nonlocal job
        job = _without_lost_hosts(job, answers or _answers_by_ssh)
        return _places(job.hosts)

    return repeat(run, max_restarts, places)


def repeat(
    run: Callable[[list[int]], int], max_restarts: int, places: Callable[[], str | None]
) -> int:
    """Make attempts until one does not fail, or another would not help.

    Args:
        run: Makes an attempt; gets a list for the signals that came meanwhile, and returns an exit
            code.
        max_restarts: How many attempts there may be after the first.
        places: Prepares the next attempt, and returns where it will be, to end a sentence; None
            where another process tells it.

    Returns:
        The exit code of the last attempt.
    """
    started = str(time.time())
    signals: list[int] = []  # Ctrl-C, SIGTERM and SIGHUP of the job itself: that was the user
    for attempt in range(max_restarts + 1):
        with _variables({COUNT: str(attempt), STARTED: started}):
            code = run(signals)
        if code == 0 or code in IN_VAIN or signals or attempt == max_restarts:
            return code
        if (where := places()) is not None:
            sys.stderr.write(
                f"wavemare: the ranks ended with {code}; restart {attempt + 1} of {max_restarts}"
                f"{where}\n"
            )
            sys.stderr.flush()
    raise AssertionError("unreachable: the last attempt returns")


def _without_lost_hosts(job: Job, answers: Callable[[Host], bool]) -> Job:
    if len(job.hosts) < 2:  # noqa: PLR2004 - the only host is this one, or all there is
        return job
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        there = list(pool.map(answers, job.hosts))
    left = [host for host, answered in zip(job.hosts, there, strict=True) if answered]
    if not left or len(left) == len(job.hosts):
        return job
    lost = ", ".join(host.name for host in job.hosts if host not in left)
    sys.stderr.write(f"wavemare: left out, as it cannot be logged in to: {lost}\n")
    return replace(job, hosts=left, hostfile=_hostfile(left))


def _answers_by_ssh(host: Host) -> bool:
    try:
        done = subprocess.run(
            [*_SSH, "--", host.name, "true"],
            timeout=_SSH_SECONDS,
            capture_output=True,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):  # the latter: there is no ssh here
        return False
    return done.returncode == 0


def _hostfile(hosts: Sequence[Host]) -> Path:
    """Write the hosts that are left where DeepSpeed finds them, until this process ends."""
    file, name = tempfile.mkstemp(prefix="wavemare-hosts-")
    atexit.register(Path(name).unlink, missing_ok=True)
    with os.fdopen(file, "w", encoding="utf-8") as lines:
        lines.writelines(f"{host.name} slots={host.slots}\n" for host in hosts)
    return Path(name)


def _places(hosts: Sequence[Host]) -> str:
    return f" on {', '.join(host.name for host in hosts)}" if hosts else ""


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
