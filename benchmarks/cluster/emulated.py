# SPDX-License-Identifier: Apache-2.0
"""Emulated hosts, joined by links of a known speed, on one machine.

Each host has its own network, name, shared memory and process numbers: ranks of two hosts reach
each other through the link alone. All hosts see the same files, as on a cluster. The links meet in
a switch inside a namespace of its own, so that the network of the machine stays as it is.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.cluster.namespaces import Namespaces, namespace_obstacle, run_tool
from benchmarks.cluster.ranks import Host, RankGroup, start_ranks
from wavemare.errors import LaunchError

MAX_HOSTS = 64

_PREFIX = "10.77.0"
_HEAD = 254
# The hosts reach no resolver, and asking one costs seconds per process.
_NAMES = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
# A common /dev/shm would join the hosts.
_HEAD_SETUP = """
echo "$2" >/proc/sys/kernel/hostname
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
"""
# Programs look for interfaces in /sys.
_HOST_SETUP = f"""
{_HEAD_SETUP}
mount -t sysfs sysfs /sys
mount -t proc proc /proc
"""
# Smaller bursts forbid the segments of 64 KiB in which the kernel sends, and cost processor time.
# At high rates the timer's precision needs more.
_MIN_BURST_BYTES = 128 * 1024
_BURST_SECONDS = 1e-3
_QUEUE = "50ms"


class EmulatedCluster:
    """Hosts ``node0``, ``node1``, ... with full-duplex links to one switch.

    Use it in a ``with`` statement. Even if this process is killed, no process, interface, mount or
    file stays. Several clusters can exist at once.

    Args:
        num_hosts: Number of hosts.
        link_mbit: Speed of each link in each direction, in Mbit/s; None for no limit.

    Attributes:
        folder: The cluster's own files, removed at its end.

    Raises:
        LaunchError: The number is out of range, or there is an `obstacle`.
    """

    def __init__(self, num_hosts: int, link_mbit: float | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            reason = "there is no such cluster"
            raise LaunchError("num_hosts", num_hosts, reason, f"Give 1 to {MAX_HOSTS}")
        self._names = [f"node{index}" for index in range(num_hosts)]
        self._link_mbit = link_mbit
        self._open = contextlib.ExitStack()
        self._head: Namespaces
        self._hosts: list[Host] = []
        self.folder = Path()
        self._jobs = 0

    obstacle = staticmethod(namespace_obstacle)
    """Returns why there can be no cluster here, in a sentence, or None if there can."""

    def enter(self, host: int) -> list[str]:
        """Return the words that run a command on a host, in the root folder, when put before it."""
        return self._hosts[host].namespaces.enter()

    def __enter__(self) -> Self:
        obstacle = self.obstacle()
        if obstacle is not None:
            value = f"{len(self._names)} hosts"
            raise LaunchError("cluster", value, obstacle, "Measure on a machine of your own")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts and their processes; the end of ``with`` calls it."""
        self._hosts = []
        self._open.close()

    def shape(self, link_mbit: float | None, hosts: Iterable[int] | None = None) -> None:
        """Change the speed of links, in both directions.

        Args:
            link_mbit: In Mbit/s, of whole Ethernet frames; None for no limit.
            hosts: Whose links; of all if omitted.
        """
        for index in range(len(self._hosts)) if hosts is None else hosts:
            host = self._hosts[index]
            for keeper, device in ((host.namespaces, "eth0"), (self._head, f"port{index}")):
                if link_mbit is None:
                    # Deleting fails where there is no limit, so one is added first.
                    command = f"qdisc replace dev {device} root pfifo\nqdisc del dev {device} root"
                else:
                    command = f"qdisc replace dev {device} root {_token_bucket(link_mbit)}"
                run_tool([*keeper.enter("--net"), "tc", "-batch", "-"], command)

    def unplug(self, host: int) -> None:
        """Cut a host's link at the switch: messages are lost, and no connection breaks."""
        self._set_port(host, "down")

    def plug(self, host: int) -> None:
        """Join a host's link to the switch again."""
        self._set_port(host, "up")

    def _set_port(self, host: int, state: str) -> None:
        run_tool([*self._head.enter("--net"), "ip", "link", "set", f"port{host}", state])

    def run_ranks(self, command: Sequence[str], *, timeout_s: float, **options: Any) -> int:
        """Run a program on all hosts to its end; see `start_ranks` and `RankGroup.wait`."""
        return self.start_ranks(command, **options).wait(timeout_s)

    def start_ranks(self, command: Sequence[str], **options: Any) -> RankGroup:
        """Start a program on all hosts; see `benchmarks.cluster.ranks.start_ranks`."""
        self._jobs += 1
        folder = self.folder / f"job{self._jobs}"
        folder.mkdir()
        port = 29500 + self._jobs  # a killed program's port stays in use for a while
        return start_ranks(
            command, self._hosts, head=self._head, folder=folder, port=port, **options
        )

    def _build(self) -> None:
        # What is entered first is closed last: the end of the switch's namespaces ends all others.
        folder = self.folder = Path(tempfile.mkdtemp(prefix="wavemare-cluster-"))
        self._open.callback(shutil.rmtree, folder, ignore_errors=True)
        rows = ["127.0.0.1 localhost", f"{_PREFIX}.{_HEAD} head"]
        rows += [f"{_address(index)} {name}" for index, name in enumerate(self._names)]
        (folder / "hosts").write_text("\n".join(rows) + "\n")
        (folder / "nsswitch.conf").write_text(_NAMES)
        # The keeper removes the folder too, in case this process is killed.
        self._head = Namespaces(
            _HEAD_SETUP, [str(folder), "head"], cleanup='rm -rf --one-file-system -- "$1"'
        )
        self._open.callback(self._head.close)
        for index, name in enumerate(self._names):
            keeper = Namespaces(_HOST_SETUP, [str(folder), name], inside=self._head)
            self._open.callback(keeper.close)
            self._hosts.append(Host(name, _address(index), keeper))
        self._connect()
        if self._link_mbit is not None:
            self.shape(self._link_mbit)

    def _connect(self) -> None:
        lines = ["link add switch type bridge", "link set switch up"]
        lines.append(f"addr add {_PREFIX}.{_HEAD}/24 dev switch")
        for index, host in enumerate(self._hosts):
            pid = host.namespaces.pid
            lines.append(f"link add port{index} type veth peer name eth0 netns {pid}")
            lines.append(f"link set port{index} master switch up")
        run_tool([*self._head.enter("--net"), "ip", "-batch", "-"], "\n".join(lines))
        for host in self._hosts:
            lines = [f"addr add {host.address}/24 dev eth0", "link set eth0 up"]
            run_tool([*host.namespaces.enter("--net"), "ip", "-batch", "-"], "\n".join(lines))


def _token_bucket(link_mbit: float) -> str:
    burst = max(_MIN_BURST_BYTES, round(link_mbit * 1e6 / 8 * _BURST_SECONDS))
    return f"tbf rate {round(link_mbit * 1e6)}bit burst {burst} latency {_QUEUE}"


def _address(index: int) -> str:
    return f"{_PREFIX}.{index + 1}"
