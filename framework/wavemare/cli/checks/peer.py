# SPDX-License-Identifier: Apache-2.0
"""What a host of a hostfile says of itself, and which of the others it can connect to.

`wavemare.cli.checks.hosts` runs the text of this file on each host (``python -c``), where wavemare
may be missing: it imports the standard library alone. Its arguments are the interface of the ranks
(empty: that of the host's name), a port to be free (0: none) and the number of hosts. It prints a
line of JSON, reads one with the hosts to connect to, prints one with those that do not answer, and
ends with its input.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

PACKAGES = ("torch", "deepspeed", "wavemare")
"""Which have to be the same on all hosts, beside Python."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LOOPBACK = "127.0.0.1"
_SECONDS = 3.0
_PARALLEL = 32


def versions() -> dict[str, str]:
    """Return the versions here; ``missing`` for a package that is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def address_of(interface: str, *, alone: bool = False) -> str:
    """Return the IPv4 address on which ranks of this host would listen.

    Args:
        interface: Its name; empty for that of the host's name.
        alone: Whether no other host has to reach it. gloo then does without the host's name.

    Raises:
        OSError: There is none; the message is a sentence.
    """
    if not interface:
        return _address_of_name(alone=alone)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", os.fsencode(interface)[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24])
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            text = f"there is no interface {interface} with an IPv4 address (it has {names})"
            raise OSError(text) from error


def _address_of_name(*, alone: bool) -> str:
    name = socket.gethostname()
    text = f"its own name {name} does not resolve there"
    try:
        address = socket.gethostbyname(name)
        text = f"its own name {name} leads to {address}, which is no address of it"
        socket.create_server((address, 0)).close()
    except OSError as error:
        if alone:
            return _LOOPBACK
        raise OSError(text) from error
    return address


def port_problem(port: int) -> str | None:
    """Return why nobody can listen on a port here; None if one can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"port {port} cannot be had there ({os.strerror(error.errno or 0)})"
    return None


def connect(peer: tuple[str, int]) -> str | None:
    """Connect to another host; return why that is not possible, or None."""
    try:
        socket.create_connection(peer, timeout=_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def main(interface: str, port: str, hosts: str) -> None:
    """Tell, listen, connect; see above."""
    told: dict[str, object] = {"versions": versions()}
    listener = None
    try:
        address = address_of(interface, alone=hosts == "1")
        listener = socket.create_server((address, 0), backlog=1024)
        told |= {"address": address, "port": listener.getsockname()[1]}
        told["problem"] = port_problem(int(port)) if int(port) else None
    except OSError as error:
        told["problem"] = str(error)
    print(json.dumps(told), flush=True)
    peers = {name: (host, number) for name, host, number in json.loads(sys.stdin.readline())}
    with ThreadPoolExecutor(_PARALLEL) as pool:
        answers = zip(peers, pool.map(connect, peers.values()), strict=True)
    print(json.dumps({name: answer for name, answer in answers if answer}), flush=True)
    sys.stdin.read()  # others may still want to connect to this host


if __name__ == "__main__":
    main(*sys.argv[1:4])
