# SPDX-License-Identifier: Apache-2.0
"""Limits that ranks ask for while a benchmark runs: shares of a core, or the speed of links.

A Unix socket carries one JSON value per request to the process that started the ranks. Its path
works on all emulated hosts, as they share files, and the kernel tells the caller's process number
as this process sees it. The kernel's CPU quotas make unlike devices of ranks: a process that has
used its share of a period waits for the next one, with all its threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from wavemare.errors import LaunchError

ADDRESS = "WAVEMARE_BENCH_REQUESTS"
"""Variable of ranks: the address that `serving` yields."""
_TIMEOUT_S = 60.0
_DONE = b"done"

CONTROL_GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Of a quota. Timed work should take many of them."""
_LEAST_QUOTA_US = 1000
_POLL_S = 0.02
# A quota is no guarantee: the greatest weight keeps other programs from slowing the ranks.
_WEIGHT = {"cgroup v2": {"cpu.weight": "10000"}, "cgroup v1": {"cpu.shares": "262144"}}


@contextmanager
def serving(handle: Callable[[int, Any], None]) -> Iterator[str]:
    """Answer the requests of `ask`, one after the other, in a thread.

    Yields:
        The address, for the variable `ADDRESS` of the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="wavemare-requests-") as folder:
        address = str(Path(folder, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            thread = threading.Thread(target=_serve, args=(listener, handle), daemon=True)
            thread.start()
            try:
                yield address
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()


def ask(value: Any, timeout_s: float = _TIMEOUT_S) -> None:
    """Send a request to the address in the environment, and wait until it is done.

    Raises:
        LaunchError: It was not done.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.environ[ADDRESS])
            connection.sendall(json.dumps(value).encode() + b"\n")
            done = connection.recv(len(_DONE)) == _DONE
    except OSError:
        done = False
    if not done:
        reason = "the command that started this rank has not done it"
        raise LaunchError("request", value, reason, "Look at the command's output")


def _serve(listener: socket.socket, handle: Callable[[int, Any], None]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        with connection, connection.makefile("rb") as lines:
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
            )
            pid, _, _ = struct.unpack("3i", credentials)
            try:
                handle(pid, json.loads(lines.readline()))
            except Exception as error:  # the rank reports the failure
                print(f"error: {error}", flush=True)
            else:
                connection.sendall(_DONE)


class Throttle:
    """Limits processes by control groups. The end of ``with`` removes all groups and limits.

    Args:
        mount: Where control groups are mounted.

    Attributes:
        way: ``cgroup v1`` or ``cgroup v2``.

    Raises:
        LaunchError: This process may not make groups with quotas.
    """

    def __init__(self, mount: Path = CONTROL_GROUPS) -> None:
        roots = (mount, mount / "cpu", mount / "cpu,cpuacct")
        failure = "there are no control groups"
        for root in roots:
            try:
                self._open(root)
            except OSError as error:
                failure = f"the kernel refuses a quota ({error.strerror})"
            else:
                return
        remedy = "Run as root of a machine of your own"
        raise LaunchError("control groups", str(mount), failure, remedy)

    def _open(self, root: Path) -> None:
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
            _write(self._home, _WEIGHT[self.way])
            self._group("trial", 1.0).rmdir()
        except OSError:
            self._home.rmdir()
            raise

    def limit(self, pid: int, share: float | None) -> None:
        """Give a process a share of a core, from now on.

        Args:
            pid: Of the process; its threads share the quota.
            share: Above 0; None for no limit.
        """
        if pid in self._groups:
            _write(self._groups[pid], quota_files(self.way, share))
            return
        self._groups[pid] = self._group(str(pid), share)
        (self._groups[pid] / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            _write(folder, quota_files(self.way, share))
        except OSError:
            folder.rmdir()
            raise
        return folder


def quota_files(way: str, share: float | None) -> dict[str, str]:
    """Return the texts of a control group's files, in the order of writing."""
    if share is None:
        if way == "cgroup v2":
            return {"cpu.max": f"max {PERIOD_US}"}
        return {"cpu.cfs_quota_us": "-1"}
    quota_us = round(share * PERIOD_US)
    # The kernel takes no smaller quota: a small share has longer periods.
    period_us = PERIOD_US if quota_us >= _LEAST_QUOTA_US else round(_LEAST_QUOTA_US / share)
    quota_us = max(quota_us, _LEAST_QUOTA_US)
    if way == "cgroup v2":
        return {"cpu.max": f"{quota_us} {period_us}"}
    return {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        if not (folder / name).exists():
            raise FileNotFoundError(2, "this is no group with a quota", str(folder / name))
        (folder / name).write_text(text)


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
