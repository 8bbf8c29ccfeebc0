# SPDX-License-Identifier: Apache-2.0
"""The checks of ``wavemare doctor`` on the hosts of a hostfile: ssh, versions, addresses."""

from __future__ import annotations

import inspect
import ipaddress
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from wavemare.cli.doctor import Finding
from wavemare.cli.job import Host, is_this_host_alone, read_hosts
from wavemare.errors import LaunchError

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SECONDS = 30.0
_PARALLEL = 64
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
INTERFACE = "GLOO_SOCKET_IFNAME"


def check_hostfile(file: Path, limit_s: float = _SECONDS) -> Iterator[Finding]:
    """Check a hostfile, log in to all its hosts at once, and compare them with this one."""
    try:
        hosts = read_hosts(file)
    except LaunchError as error:
        yield Finding("hostfile", "fail", f"{file}: {error.reason}", error.remedy)
        return
    slots = sum(host.slots for host in hosts)
    yield Finding("hostfile", "ok", f"{file}: {len(hosts)} hosts, {slots} ranks")
    if is_this_host_alone(hosts):
        yield Finding(f"host {hosts[0].name}", "ok", "this host: ranks are started without ssh")
        return
    if shutil.which("pdsh") is None:
        yield Finding("pdsh", "warn", "not found", "Install pdsh, or start the ranks by mpirun")
    if shutil.which("ssh") is None:
        yield Finding("ssh", "fail", "not found", "Install ssh")
    else:
        here = host_facts()["versions"]
        check = partial(_check_host, here=here, alone=len(hosts) == 1, limit_s=limit_s)
        with ThreadPoolExecutor(min(_PARALLEL, len(hosts))) as pool:
            yield from pool.map(check, hosts)


def _check_host(host: Host, *, here: dict[str, str], alone: bool, limit_s: float) -> Finding:
    name = f"host {host.name}"
    # wavemare may be missing there: the function alone goes there, as text.
    program = (
        f"from __future__ import annotations\n{inspect.getsource(host_facts)}\n"
        "import json\nprint(json.dumps(host_facts()))"
    )
    # As DeepSpeed starts the ranks there: with this interpreter, in this folder.
    words = shlex.join([sys.executable, "-c", program])
    command = [*_SSH, "--", host.name, f"cd {shlex.quote(os.getcwd())} && exec {words}"]
    try:
        done = subprocess.run(
            command,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        value = f"its check took longer than {limit_s:g} s"
        return Finding(name, "fail", value, f"Try: ssh {host.name} hostname")
    if done.returncode:
        return Finding(name, "fail", *_failure(host, done))
    facts = json.loads(done.stdout.splitlines()[-1])  # a login script may print a greeting first
    problem = _problem(facts, here, alone=alone)
    if problem is not None:
        return Finding(name, "fail", *problem)
    versions = ", ".join(f"{key} {version}" for key, version in facts["versions"].items())
    return Finding(name, "ok", f"{facts['address']} by ssh: {versions}")


def _failure(host: Host, done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Return why the program did not run on a host, and the remedy."""
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == _SSH_FAILED:
        return f"ssh: {last}", f"Let this user in without a password: ssh-copy-id {host.name}"
    if done.returncode in _NOT_FOUND:
        remedy = "Install the same environment there, at the same path"
        return f"it has no {sys.executable} ({last})", remedy
    return last, f"Share {os.getcwd()} and {sys.prefix} between the hosts, or copy them there"


def _problem(facts: dict[str, Any], here: dict[str, str], *, alone: bool) -> tuple[str, str] | None:
    """Return what keeps ranks from working on a host, and the remedy; None if nothing."""
    versions = facts["versions"]
    differences = [
        f"{name} {versions[name]} (here {version})"
        for name, version in here.items()
        if versions[name] != version
    ]
    if differences:
        return ", ".join(differences), "Install the same versions on all hosts"
    return network_problem(facts, alone=alone)


def network_problem(facts: dict[str, Any], *, alone: bool) -> tuple[str, str] | None:
    """Return why other hosts cannot reach a host, and the remedy; None if they can.

    A host that is ``alone`` may have any address.
    """
    interface, listed = os.environ.get(INTERFACE), ", ".join(facts["interfaces"])
    remedy = f"Name the interface between the hosts: export {INTERFACE}=..."
    if interface:
        if interface in facts["interfaces"]:
            return None
        return f"there is no interface {interface} (it has {listed})", remedy
    address = facts["address"]
    if alone or (address and not ipaddress.ip_address(address).is_loopback):
        return None
    problem = f"leads to {address}, where no other host reaches it" if address else "is unknown"
    return f"its own name {problem} (it has {listed})", remedy


def host_facts() -> dict[str, Any]:
    """Return versions (``missing`` if not installed), address (None if unknown), interfaces."""
    import platform
    import socket
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "wavemare"):  # they must be the same on all hosts
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = None
    interfaces = [name for _, name in socket.if_nameindex()]
    return {"versions": versions, "address": address, "interfaces": interfaces}
