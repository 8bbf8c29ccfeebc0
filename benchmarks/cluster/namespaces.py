# SPDX-License-Identifier: Apache-2.0
"""Linux namespaces and the process that keeps them open: an emulated host consists of these.

The namespaces have no name that other programs see, as those of ``ip netns`` have. The kernel
removes them with their mounts, network interfaces and processes when the keeping process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence

import psutil

from wavemare.errors import LaunchError

KINDS = ("--net", "--uts", "--ipc", "--mount", "--pid")
"""The kinds of fresh namespaces, as options of ``unshare`` and ``nsenter``."""

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "sh")
_FRESH = ("unshare", *KINDS, "--fork", "--kill-child")
# The keeper is process 1 of its namespace. /proc is still the outer one and tells its outer
# number. It stays until its input ends, which also happens if the parent is killed.
_KEEPER = """
read -r pid rest </proc/self/stat
{setup}
echo "$pid"
read -r line || true
{cleanup}
"""
_TRIAL = """
ip link add w0 type veth peer name w1
ip link add w2 type bridge
tc qdisc add dev w0 root tbf rate 100mbit burst 128kb latency 50ms
mount -t proc proc /proc
mount -t sysfs sysfs /sys
"""
_CLOSE_SECONDS = 10.0
_POLL_SECONDS = 0.01


class Namespaces:
    """Fresh net, uts, ipc, mount and pid namespaces, open until `close`.

    Everything disappears when this process ends, in whatever way. If the keeping process is
    killed, all processes of the pid namespace are killed too.

    Args:
        setup: Shell commands for the first process of the namespaces. ``/proc`` is still the outer
            one. They may use ``arguments`` as ``$1``, ``$2``, ...
        arguments: See ``setup``.
        cleanup: Shell commands that run there at the end, before the processes are killed.
        inside: Namespaces in which these are nested; None for those of this process.

    Attributes:
        pid: Outer number of the keeping process.

    Raises:
        LaunchError: The kernel refuses, or the setup failed.
    """

    def __init__(
        self,
        setup: str,
        arguments: Sequence[str] = (),
        *,
        cleanup: str = "",
        inside: Namespaces | None = None,
    ) -> None:
        outer = inside.enter("--net", "--mount", "--pid") if inside else []
        script = _KEEPER.format(setup=setup, cleanup=cleanup)
        self._process = subprocess.Popen(
            [*outer, *_FRESH, "sh", "-ec", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # The parent handles Ctrl-C, and closes in the right order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line.isdecimal():
            self._end_process()
            reason = line.rstrip(".") or "the first process ended at once"
            raise LaunchError("namespaces", "new", reason, "Run as root of a machine of your own")
        self.pid = int(line)
        # An open file keeps the namespace's number from being used again.
        self._file = os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._number = os.fstat(self._file).st_ino

    def enter(self, *options: str) -> list[str]:
        """Return the words that run a command in these namespaces, when put before it.

        Args:
            options: Of ``nsenter``: some of `KINDS`, or others; all of `KINDS` if none is given.
        """
        return ["nsenter", "--target", str(self.pid), *(options or KINDS), "--"]

    def members(self) -> list[psutil.Process]:
        """Return the live processes of the pid namespace, without the keeper, oldest first."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
                number = os.stat(f"/proc/{process.pid}/ns/pid").st_ino
                dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
                if number == self._number and process.pid != self.pid and not dead:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def kill_members(self) -> None:
        """Kill all processes of the pid namespace except the keeper, and wait for their end."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while (members := self.members()) and time.monotonic() < deadline:
            for process in members:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End all processes of the namespaces and the namespaces themselves."""
        self._end_process()
        os.close(self._file)

    def _end_process(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def namespace_obstacle() -> str | None:
    """Return why there can be no namespaces with network links here, or None if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may create hosts as namespaces"
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"the program {tool!r} is not installed (packages iproute2, util-linux, mount)"
    try:
        Namespaces(_TRIAL).close()
    except LaunchError as error:
        return f"the kernel refuses: {error.reason}"
    return None


def run_tool(command: Sequence[str], text: str = "") -> str:
    """Run a short command and return its output.

    Raises:
        LaunchError: It failed.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LaunchError("command", " ".join(command), reason, "Try it by hand")
    return done.stdout
