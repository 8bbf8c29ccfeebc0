# SPDX-License-Identifier: Apache-2.0
"""Ranks as unlike devices: each process gets a share of a core's time.

By the kernel's CPU quotas where this process may set them (control groups of version 1 or 2): a
process that has used its share of a period waits for the next one, with all its threads. Elsewhere
a thread stops and continues it by signals, on a duty cycle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "GroupThrottle",
    "PacingThrottle",
    "Throttle",
    "open_throttle",
    "pace",
    "quota_files",
    "weight_files",
]

CONTROL_GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Of a quota. Work that is timed should take many of them."""
_LEAST_QUOTA_US = 1000
_PACE_S = 0.02
_POLL_S = 0.02


class Throttle(ABC):
    """Limits processes; `close` lets all run freely again.

    Attributes:
        way: How: ``cgroup v1``, ``cgroup v2`` or ``pacing``.
    """

    way: str

    @abstractmethod
    def limit(self, pid: int, share: float | None) -> None:
        """Give a process a share of a core, from now on.

        Args:
            pid: Of the process; its threads share what it gets.
            share: Above 0; None for no limit.
        """

    @abstractmethod
    def close(self) -> None:
        """Let all processes run freely, and leave nothing behind."""


class GroupThrottle(Throttle):
    """A control group for each process, all of them within one of the greatest weight.

    A quota is a limit and no promise: other programs would slow the fast ranks first.

    Args:
        root: Where the groups of the controller ``cpu`` are mounted.

    Raises:
        OSError: This process may not make groups there, or they have no quota.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        unified = (root / "cgroup.controllers").exists()
        self.way = "cgroup v2" if unified else "cgroup v1"
        self._groups: dict[int, Path] = {}
        self._home = root / f"wavemare-{os.getpid()}-{time.monotonic_ns():x}"
        self._home.mkdir()
        try:
            if unified:
                for folder in (root, self._home):
                    (folder / "cgroup.subtree_control").write_text("+cpu")
            _write(self._home, weight_files(self.way))
            self._group("trial", 1.0).rmdir()
        except OSError:
            self._home.rmdir()
            raise

    def limit(self, pid: int, share: float | None) -> None:
        """Put a process into a group with the quota."""
        if pid in self._groups:
            self._set_quota(self._groups[pid], share)
            return
        self._groups[pid] = self._group(str(pid), share)
        (self._groups[pid] / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Move the processes back, and remove the groups."""
        for group in self._groups.values():
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has ended
                    (self._root / "cgroup.procs").write_text(pid)
            _remove(group)
        self._groups = {}
        _remove(self._home)

    def _group(self, name: str, share: float | None) -> Path:
        folder = self._home / name
        folder.mkdir()
        try:
            self._set_quota(folder, share)
        except OSError:
            folder.rmdir()
            raise
        return folder

    def _set_quota(self, folder: Path, share: float | None) -> None:
        _write(folder, quota_files(self.way, share))


class PacingThrottle(Throttle):
    """Stops and continues processes by SIGSTOP and SIGCONT.

    A share is one of the time, which is the same only while there is a core for each process that
    is not stopped.
    """

    way = "pacing"

    def __init__(self) -> None:
        self._paced: dict[int, tuple[threading.Event, threading.Thread]] = {}

    def limit(self, pid: int, share: float | None) -> None:
        """Begin to pace a process, or stop that."""
        self._free(pid)
        if share is None or share >= 1:
            return
        ended = threading.Event()
        thread = threading.Thread(target=pace, args=(pid, share, ended), daemon=True)
        self._paced[pid] = ended, thread
        thread.start()

    def close(self) -> None:
        """Let all processes go on."""
        for pid in list(self._paced):
            self._free(pid)

    def _free(self, pid: int) -> None:
        if pid in self._paced:
            ended, thread = self._paced.pop(pid)
            ended.set()
            thread.join()


@contextmanager
def open_throttle(mount: Path = CONTROL_GROUPS) -> Iterator[Throttle]:
    """Limit processes in the best way that there is; nothing stays behind, after SIGTERM neither.

    Args:
        mount: Where control groups are mounted.
    """
    throttle = _best(mount)
    try:
        with _ended_by_exception():
            yield throttle
    finally:
        throttle.close()


def quota_files(way: str, share: float | None) -> dict[str, str]:
    """Return what the files of a control group must say: name -> text, in the order of writing."""
    if share is None:
        if way == "cgroup v2":
            return {"cpu.max": f"max {PERIOD_US}"}
        return {"cpu.cfs_quota_us": "-1"}
    quota_us = round(share * PERIOD_US)
    # The kernel takes no smaller quota: longer periods then.
    period_us = PERIOD_US if quota_us >= _LEAST_QUOTA_US else round(_LEAST_QUOTA_US / share)
    quota_us = max(quota_us, _LEAST_QUOTA_US)
    if way == "cgroup v2":
        return {"cpu.max": f"{quota_us} {period_us}"}
    return {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}


def weight_files(way: str) -> dict[str, str]:
    """Return what the files of a control group must say for the greatest weight there is."""
    if way == "cgroup v2":
        return {"cpu.weight": "10000"}
    return {"cpu.shares": "262144"}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        if not (folder / name).exists():
            raise FileNotFoundError(folder / name)
        (folder / name).write_text(text)


@contextmanager
def _ended_by_exception() -> Iterator[None]:
    """Have SIGTERM raise `SystemExit` meanwhile, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _best(mount: Path) -> Throttle:
    for root in (mount, mount / "cpu", mount / "cpu,cpuacct"):
        with contextlib.suppress(OSError):
            return GroupThrottle(root)
    return PacingThrottle()


def _remove(group: Path) -> None:
    """Remove a group, as soon as the kernel has noticed that it is empty."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            return


def pace(
    pid: int,
    share: float,
    ended: threading.Event,
    *,
    clock: Callable[[], float] = time.perf_counter,
    send: Callable[[int, int], None] = os.kill,
) -> None:
    """Stop and continue a process until the event is set.

    Args:
        pid: Of the process.
        share: Of the time in which it runs.
        ended: Waited for between signals.
        clock: Seconds.
        send: Sends a signal to a process.
    """
    # This thread wakes late on a busy machine. What a process ran or waited too long is paid back,
    # so that its share is right on average: a run of t asks for a pause of t * ratio.
    ratio = (1 - share) / share
    owed_s = 0.0
    try:
        started = clock()
        while not ended.wait(share * _PACE_S - min(owed_s, 0.0) / ratio):
            send(pid, signal.SIGSTOP)
            stopped = clock()
            owed_s += (stopped - started) * ratio
            ended.wait(owed_s)
            send(pid, signal.SIGCONT)
            started = clock()
            owed_s -= started - stopped
    except ProcessLookupError:
        return
