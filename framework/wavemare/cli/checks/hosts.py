# SPDX-License-Identifier: Apache-2.0
"""The hosts of a hostfile seen from within: ssh, versions, addresses, and each to each by TCP."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from wavemare.cli.checks import peer
from wavemare.cli.checks.finding import Finding
from wavemare.cli.checks.hostfile import Host

__all__ = ["check_hosts"]

_PROGRAM = Path(peer.__file__)
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SECONDS = 30.0
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
_INTERFACE = "GLOO_SOCKET_IFNAME"


class _Visit:
    """A host on which `peer` runs, by ssh.

    Attributes:
        host: Its line of the hostfile.
        told: What it has said of itself; empty if it has failed.
        finding: How it has failed; None if it has not.
    """

    def __init__(self, host: Host, interface: str, port: int, hosts: int, limit_s: float) -> None:
        self.host = host
        self.told: dict[str, Any] = {}
        self.finding: Finding | None = None
        program = _PROGRAM.read_text(encoding="utf-8")
        words = [sys.executable, "-c", program, interface, str(port), str(hosts)]
        # DeepSpeed too starts the ranks with this interpreter, in this folder.
        command = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
        self._process = subprocess.Popen(
            [*_SSH, "--", host.name, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._limit_s = limit_s
        self._limit = threading.Timer(limit_s, self._process.kill)
        self._limit.daemon = True
        self._limit.start()

    def listen(self) -> None:
        """Read the next line that the host says."""
        assert self._process.stdout is not None
        if self.finding is not None:
            return
        for line in self._process.stdout:
            if line.startswith("{"):  # a login script may greet first
                self.told |= json.loads(line)
                return
        self.finding = self._failure()

    def ask(self, peers: Sequence[tuple[str, str, int]]) -> None:
        """Have the host connect to others, given as name, address and port; then `listen`."""
        assert self._process.stdin is not None
        if self.finding is None:
            self.told = {}
            with suppress(BrokenPipeError):  # it has ended, and has said why
                self._process.stdin.write(json.dumps(peers) + "\n")
                self._process.stdin.flush()
            self.listen()

    def close(self) -> None:
        """End the host's program."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        self._process.wait()
        self._limit.cancel()

    def fail(self, value: str, remedy: str) -> None:
        """Note what is wrong with the host."""
        self.finding = Finding(f"host {self.host.name}", "fail", value, remedy)

    def _failure(self) -> Finding:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().strip().splitlines()
        last = lines[-1] if lines else "it says nothing"
        code, name = self._process.wait(), self.host.name
        if code < 0:
            value = f"its check took longer than {self._limit_s:g} s"
            remedy = f"Try: ssh {name} hostname"
        elif code == _SSH_FAILED:
            value, remedy = (
                f"ssh: {last}",
                f"Let this user in without a password: ssh-copy-id {name}",
            )
        elif code in _NOT_FOUND:
            value = f"it has no {sys.executable} ({last})"
            remedy = "Install the same environment there, at the same path"
        else:
            value = last
            remedy = f"Share {os.getcwd()} and {sys.prefix} between the hosts, or copy them there"
        return Finding(f"host {name}", "fail", value, remedy)


def check_hosts(
    hosts: Sequence[Host], port: int = 0, limit_s: float = _SECONDS
) -> Iterator[Finding]:
    """Log in to all hosts at once; compare their versions; let each connect to each other.

    Args:
        hosts: They answer on their ssh ports.
        port: On which rank 0 is to listen on the first host; 0 if it does not matter.
        limit_s: How long the check of a host may take.
    """
    if shutil.which("ssh") is None:
        yield Finding("ssh", "fail", "not found", "Install it: apt install openssh-client")
        return
    interface = os.environ.get(_INTERFACE, "")
    visits = [
        _Visit(host, interface, port if number == 0 else 0, len(hosts), limit_s)
        for number, host in enumerate(hosts)
    ]
    try:
        with ThreadPoolExecutor(len(visits)) as pool:
            list(pool.map(_Visit.listen, visits))
            for visit in visits:
                if visit.finding is None:
                    _judge(visit, peer.versions(), alone=len(hosts) == 1)
            yield from _connections(visits, pool)
    finally:
        for visit in visits:
            visit.close()


def _judge(visit: _Visit, here: Mapping[str, str], *, alone: bool) -> None:
    """Note what is wrong with what a host has told."""
    told = visit.told
    differences = [
        f"{name} {told['versions'].get(name)} (here {version})"
        for name, version in here.items()
        if told["versions"].get(name) != version
    ]
    if differences:
        visit.fail(", ".join(differences), "Install the same versions on all hosts")
    elif told["problem"]:
        visit.fail(told["problem"], f"Free the port, or name an interface: export {_INTERFACE}=...")
    elif not alone and _is_loopback(told["address"]):
        value = f"to itself it is {told['address']}, where no other host reaches it"
        visit.fail(value, f"Name the interface between the hosts: export {_INTERFACE}=...")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _connections(visits: Sequence[_Visit], pool: ThreadPoolExecutor) -> Iterator[Finding]:
    good = [visit for visit in visits if visit.finding is None]
    places = {v.host.name: (v.told["address"], v.told["port"]) for v in good}
    shown = {v.host.name: v.told["versions"] for v in good}
    rows = [(name, *place) for name, place in places.items()]

    def connect(visit: _Visit) -> None:
        visit.ask([row for row in rows if row[0] != visit.host.name])

    list(pool.map(connect, good))
    for visit in visits:
        name = visit.host.name
        if visit.finding is None and visit.told:
            other, reason = next(iter(visit.told.items()))
            address, number = places[other]
            visit.fail(
                f"it cannot connect to {other} ({address}, port {number}): {reason}",
                f"Open all TCP ports between the hosts, or export {_INTERFACE} for another network",
            )
        if visit.finding is None:
            text = ", ".join(f"{key} {version}" for key, version in shown[name].items())
            others = f", connects to {len(good) - 1} others" if len(good) > 1 else ""
            yield Finding(f"host {name}", "ok", f"{places[name][0]} by ssh: {text}{others}")
        else:
            yield visit.finding
