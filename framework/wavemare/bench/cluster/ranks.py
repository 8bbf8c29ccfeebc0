# SPDX-License-Identifier: Apache-2.0
"""A program that runs as one or more ranks on each emulated host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from wavemare.bench.cluster.namespaces import Namespaces

__all__ = ["TIMEOUT_CODE", "Host", "RankGroup"]

TIMEOUT_CODE = 124
"""Exit code of a program that was killed after its time limit, as of ``timeout``."""

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Host:
    """An emulated host.

    Attributes:
        name: As in ``/etc/hosts`` of all hosts.
        address: Of its ``eth0``.
        namespaces: Of its processes.
    """

    name: str
    address: str
    namespaces: Namespaces


class RankGroup:
    """A program that runs on the hosts.

    Args:
        processes: Children of this process: each rank's parent, or a launcher.
        hosts: The hosts of the ranks.
        logs: Folder of ``rank_N.log``, the ranks' outputs, and ``launcher.log``.
        ranks: Number of ranks.
        echo: Whether outputs are printed.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        *,
        hosts: Sequence[Host],
        logs: Path,
        ranks: int,
        echo: bool,
    ) -> None:
        self._processes = processes
        self._hosts = hosts
        names = ["launcher", *(f"rank_{rank}" for rank in range(ranks))]
        self._tails = [_Tail(logs / f"{name}.log", name) for name in names] if echo else []

    @property
    def running(self) -> bool:
        """Whether any of its processes still runs."""
        return any(process.poll() is None for process in self._processes)

    def pids(self) -> dict[int, int]:
        """Return rank -> outer process number, of the ranks that have started."""
        found: dict[int, int] = {}
        for host in self._hosts:
            for process in host.namespaces.members():  # a rank comes before its children
                with contextlib.suppress(psutil.Error):
                    variables = process.environ()
                    if "LOCAL_RANK" in variables:
                        found.setdefault(int(variables["RANK"]), process.pid)
        return found

    def wait(self, timeout_s: float, grace_s: float = _GRACE_SECONDS) -> int:
        """Wait for the program's end, and leave none of its processes on the hosts.

        Args:
            timeout_s: Seconds after which all of its processes are killed.
            grace_s: Seconds for the other ranks to end after one has failed.

        Returns:
            0 if all ranks returned 0; the code of the first failure (128 + n for signal n);
            `TIMEOUT_CODE` after the time limit.
        """
        deadline = time.monotonic() + timeout_s
        code = 0
        try:
            while self.running:
                self._echo()
                if not code and (code := self._failure()):
                    deadline = min(deadline, time.monotonic() + grace_s)
                if time.monotonic() > deadline:
                    return code or TIMEOUT_CODE
                time.sleep(_POLL_SECONDS)
            return code or self._failure()
        finally:
            self.kill()
            self._echo(to_end=True)

    def kill(self) -> None:
        """Kill all processes of the program."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for host in self._hosts:
            host.namespaces.kill_members()
        for process in self._processes:
            process.wait()

    def _failure(self) -> int:
        codes = [process.poll() or 0 for process in self._processes]
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def _echo(self, to_end: bool = False) -> None:
        for tail in self._tails:
            tail.print_new(to_end)


class _Tail:
    """Prints the new lines of a file, with a name before each."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name.removeprefix("rank_")
        self._offset = 0

    def print_new(self, to_end: bool) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = len(data) if to_end else data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].decode(errors="replace").splitlines():
            print(f"[{self._name}] {line}", flush=True)
