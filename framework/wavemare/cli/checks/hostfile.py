# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hostfile: its syntax, and whether its hosts answer."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from pathlib import Path

from wavemare.cli.checks import peer
from wavemare.cli.checks.finding import Finding
from wavemare.cli.checks.network import within

__all__ = ["Host", "check_hostfile", "is_this_host_alone", "parse_hostfile", "read_hostfile"]

_ENTRY = re.compile(r"^(\S+)\s+slots=(\d{1,9})(?!\d)(?P<rest>.*)$")
_REMEDY = "Write 'HOST slots=N', N being the number of ranks on that host"
_SSH_PORT = 22
_ANSWER_SECONDS = 1.0
_LOOKUP_SECONDS = 3.0
_PARALLEL = 64
_HERE = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Host:
    """One line of a hostfile.

    Attributes:
        name: As ssh is given it.
        slots: Number of ranks.
        line: Its line, from 1.
    """

    name: str
    slots: int
    line: int


def check_hostfile(file: Path, port: int = 0) -> Iterator[Finding]:
    """Check a hostfile, that its hosts answer, and that ranks could work together on them.

    Args:
        file: DeepSpeed goes on with this machine alone if it does not exist.
        port: On which rank 0 is to listen on the first host; 0 if it does not matter.
    """
    try:
        text = read_hostfile(file)
    except OSError as error:
        value = f"{file} cannot be read ({error.strerror}): deepspeed would use this host alone"
        yield Finding("hostfile", "fail", value, "Name an existing file")
        return
    hosts, findings = parse_hostfile(text)
    yield from findings
    if hosts:
        slots = sum(host.slots for host in hosts)
        yield Finding("hostfile", "ok", f"{file}: {len(hosts)} hosts, {slots} ranks")
        if is_this_host_alone(hosts):
            yield _check_this_host(hosts[0], port)
            return
        with ThreadPoolExecutor(max_workers=min(_PARALLEL, len(hosts))) as pool:
            answers = list(pool.map(check_host, hosts))
        if any(answer.status == "fail" for answer in answers):
            yield from answers
            return
        from wavemare.cli.checks.hosts import check_hosts

        yield from check_hosts(hosts, port)


def read_hostfile(file: Path) -> str:
    """Return a hostfile's text; bytes that are none stand there as such, and so make a wrong line.

    Raises:
        OSError: It cannot be read.
    """
    return file.read_text(encoding="utf-8", errors="backslashreplace")


def parse_hostfile(text: str) -> tuple[list[Host], list[Finding]]:
    """Read a hostfile as DeepSpeed does, but tell of everything that it refuses or passes over.

    Args:
        text: Lines ``HOST slots=N``, empty lines and comments (``#``).

    Returns:
        The hosts of valid lines, and what is wrong with the others.
    """
    hosts: dict[str, Host] = {}
    findings = []

    def problem(number: int, value: str, remedy: str = _REMEDY) -> None:
        findings.append(Finding("hostfile", "fail", f"line {number}: {value}", remedy))

    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        match = _ENTRY.match(entry)
        if match is None:
            problem(number, f"{entry[:80]!r} is not a host with its slots")
        elif match["rest"] and not match["rest"].lstrip().startswith("#"):
            problem(number, f"{match['rest'].strip()!r} is passed over by deepspeed", "Remove it")
        elif int(match[2]) == 0:
            problem(number, f"{match[1]} has no slots", "Give it 1 or more, or remove the line")
        elif match[1] in hosts:
            first = hosts[match[1]].line
            problem(number, f"{match[1]} stands in line {first} too", "Join the two lines")
        else:
            hosts[match[1]] = Host(match[1], int(match[2]), number)
    if not hosts and not findings:
        findings.append(Finding("hostfile", "fail", "it names no host", _REMEDY))
    return list(hosts.values()), findings


def is_this_host_alone(hosts: Sequence[Host]) -> bool:
    """Whether a hostfile names but this host, on which ranks are started without ssh."""
    return [host.name for host in hosts] in [[name] for name in (*_HERE, socket.gethostname())]


def _check_this_host(host: Host, port: int) -> Finding:
    check = f"host {host.name}"
    problem = peer.port_problem(port) if port else None
    if problem is not None:
        return Finding(check, "fail", problem, "Free the port, or choose another one")
    return Finding(check, "ok", "this host: ranks are started without ssh")


def check_host(host: Host) -> Finding:
    """Check that a host's name resolves and that its ssh port answers."""
    check = f"host {host.name}"
    target = _ssh_target(host.name)
    if target is None:
        return Finding(check, "ok", "ssh goes through another host")
    name, port = target
    try:
        address = within(_LOOKUP_SECONDS, lambda: socket.gethostbyname(name))
    except Late:
        value = f"looking it up takes longer than {_LOOKUP_SECONDS:g} s"
        return Finding(check, "fail", value, f"Add {name} to /etc/hosts")
    except (OSError, UnicodeError):  # the latter: an empty label, or one of over 63 characters
        remedy = f"Mend line {host.line} of the hostfile, or add {name} to /etc/hosts"
        return Finding(check, "fail", "its name does not resolve", remedy)
    try:
        with socket.create_connection((address, port), timeout=_ANSWER_SECONDS):
            return Finding(check, "ok", f"{address}, ssh answers on port {port}")
    except OSError as error:
        value = f"{address} does not answer on port {port} ({error})"
        return Finding(check, "fail", value, f"Start sshd there; try: ssh {host.name} hostname")


def _ssh_target(name: str) -> tuple[str, int] | None:
    """Return the name and port that ssh would use, as the user's ssh configuration says.

    None if ssh goes through another host or a program, which alone may know the name.
    """
    # A name that starts with a dash would be an option.
    if shutil.which("ssh") is None or name.startswith("-"):
        return name, _SSH_PORT
    try:
        answer = subprocess.run(
            ["ssh", "-G", name], capture_output=True, text=True, timeout=2.0, check=False
        )
    except subprocess.TimeoutExpired:
        return name, _SSH_PORT
    settings = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
    if {settings.get("proxyjump", "none"), settings.get("proxycommand", "none")} != {"none"}:
        return None
    return settings.get("hostname", name), int(settings.get("port", _SSH_PORT))
