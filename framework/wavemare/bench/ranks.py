# SPDX-License-Identifier: Apache-2.0
"""Programs that run as one rank or more on each host of a laboratory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wavemare.bench.namespaces import Namespaces

__all__ = ["TIMEOUT_CODE", "Host", "RankGroup"]

TIMEOUT_CODE = 124
"""Exit code of a program that was killed because its time was up, as of ``timeout``."""

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Host:
    """A host of a laboratory.

    Attributes:
        name: As in its ``/etc/hosts`` and that of the others.
        address: Of its ``eth0``.
        namespaces: What it consists of.
    """

    name: str
    address: str
    namespaces: Namespaces


class RankGroup:
    """A program that runs on the hosts.

    Args:
        processes: What was started here: the ranks' own parents, or a launcher.
        hosts: Those on which the ranks run.
        folder: Holds ``rank_N.pid``, the number of each rank's process on its host.
        logs: Holds ``rank_N.log``, the outputs, and ``launcher.log``, what was said beside them.
        ranks: How many there will be.
        echo: Whether outputs are printed.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        *,
        hosts: Sequence[Host],
        folder: Path,
        logs: Path,
        ranks: int,
        echo: bool,
    ) -> None:
        self._processes = processes
        self._hosts = hosts
        self._folder = folder
        self._ranks = ranks
        names = ["launcher", *(f"rank_{rank}" for rank in range(ranks))]
        self._tails = [_Tail(logs / f"{name}.log", name) for name in names] if echo else []

    @property
    def running(self) -> bool:
        """Whether any process of it has not ended."""
        return any(process.poll() is None for process in self._processes)

    def pids(self) -> dict[int, int]:
        """Return rank -> number of its process on this machine, of those that run by now."""
        per_host = self._ranks // len(self._hosts)
        result = {}
        for index, host in enumerate(self._hosts):
            outside = {inner: outer for outer, inner in host.namespaces.members().items()}
            for rank in range(index * per_host, (index + 1) * per_host):
                file = self._folder / f"rank_{rank}.pid"
                text = file.read_text().strip() if file.exists() else ""
                if text and int(text) in outside:
                    result[rank] = outside[int(text)]
        return result

    def wait(self, timeout_s: float, grace_s: float = _GRACE_SECONDS) -> int:
        """Wait for the program's end, and leave no process of it on the hosts.

        Args:
            timeout_s: After this time, in seconds, all of its processes are killed.
            grace_s: How long the other ranks may go on after one has failed, in seconds.

        Returns:
            0 if all ranks returned 0; that of the first that did not (128 + its number for a
            signal); `TIMEOUT_CODE` if the time was up.
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
        """End all processes of the program, at once."""
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
    """Prints what is added to a file, line by line, with a name before each."""

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
