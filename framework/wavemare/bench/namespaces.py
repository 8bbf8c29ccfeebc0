# SPDX-License-Identifier: Apache-2.0
"""Linux namespaces with a process that keeps them: what a host of a laboratory is made of.

Nothing here has a name that other programs see (as ``ip netns`` gives): the kernel removes the
namespaces, their mounts, network interfaces and processes when the keeping process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from wavemare.errors import LaunchError

__all__ = ["KINDS", "Namespaces", "namespace_obstacle", "run_tool"]

KINDS = ("--net", "--uts", "--ipc", "--mount", "--pid")
"""The kinds of namespaces that are fresh, as options of ``unshare`` and ``nsenter``."""

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "sh")
_FRESH = ("unshare", *KINDS, "--fork", "--kill-child")
# The process is number 1 of its own namespace, but /proc is still the one outside and tells its
# number there. It stays until its input ends, which also happens if the parent is killed.
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

    All of it disappears when this process ends, in whatever way. If the keeping process is killed,
    so are all processes in the pid namespace, as if a host had lost its power.

    Args:
        setup: Shell commands run as the first process of the namespaces; ``/proc`` is still the
            one outside. They may use ``arguments`` as ``$1``, ``$2``, ...
        arguments: See ``setup``.
        cleanup: Shell commands run there at the end, before the processes are killed.
        inside: Namespaces in which these are nested; None for those of this process.

    Attributes:
        pid: Number of the keeping process, outside.

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
            # Ctrl-C in the terminal is for the parent, which then closes in the right order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line.isdecimal():
            self._end_process()
            reason = line.rstrip(".") or "the first process ended at once"
            raise LaunchError("namespaces", "new", reason, "Run as root of a machine of your own")
        self.pid = int(line)
        # While it is open, no other namespace gets this one's number.
        self._file = os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._number = os.fstat(self._file).st_ino

    def enter(self, *options: str) -> list[str]:
        """Return the words that, before a command, run it in these namespaces.

        Args:
            options: Of ``nsenter``: some of `KINDS`, or others; all of `KINDS` if none is given.
        """
        return ["nsenter", "--target", str(self.pid), *(options or KINDS), "--"]

    def members(self) -> dict[int, int]:
        """Return the processes of the pid namespace beside the keeper: number outside -> inside."""
        inside = {}
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if pid != self.pid and self._has(pid) and (inner := _inner_pid(pid)) is not None:
                    inside[pid] = inner
        return inside

    def kill_members(self) -> None:
        """Kill all processes of the pid namespace except the keeper, and wait for their end."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while (members := self.members()) and time.monotonic() < deadline:
            for pid in members:
                with contextlib.suppress(OSError), _opened(pid) as process:
                    # The number may by now be that of a stranger: look again, at what is opened.
                    if self._has(pid):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
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

    def _has(self, pid: int) -> bool:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == self._number


def namespace_obstacle() -> str | None:
    """Return why namespaces with network links cannot be had here, in a sentence, or None."""
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

    Args:
        command: The words.
        text: Its standard input.

    Raises:
        LaunchError: It failed.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LaunchError("command", " ".join(command), reason, "Try it by hand")
    return done.stdout


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def _inner_pid(pid: int) -> int | None:
    """Return a process's number in its own namespace; None for a dead one that nobody collects."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        lines = dict(line.split(":", 1) for line in status)
    return None if lines["State"].split()[0] in "XZ" else int(lines["NSpid"].split()[-1])
