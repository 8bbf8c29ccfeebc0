# SPDX-License-Identifier: Apache-2.0
"""The interface that ranks would talk through."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path

from wavemare.cli.checks.finding import Finding

__all__ = [
    "check_hostname",
    "check_interface_variables",
    "check_loopback",
    "default_interface",
    "within",
]

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ROUTES = Path("/proc/net/route")
_LOOKUP_SECONDS = 2.0


def check_loopback() -> Iterator[Finding]:
    """Connect to this machine by TCP, as ranks on one host do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=1.0):
                yield Finding("loopback", "ok", "TCP connection to 127.0.0.1")
    except OSError as error:
        remedy = "Allow TCP on the interface lo (firewall, or 'ip link set lo up')"
        yield Finding("loopback", "fail", str(error), remedy)


def check_hostname(routes: Path = _ROUTES, limit_s: float = _LOOKUP_SECONDS) -> Iterator[Finding]:
    """Check which interface the host's name leads to: gloo listens there by default.

    Args:
        routes: The kernel's routing table.
        limit_s: How long the name may take to be looked up.
    """
    name = socket.gethostname()
    interface = default_interface(routes)
    advice = (
        f"For several hosts: export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
        if interface
        else ""
    )
    try:
        address = within(limit_s, lambda: socket.gethostbyname(name))
    except Late:
        value = f"looking up {name} takes longer than {limit_s:g} s"
        yield Finding("host name", "warn", value, f"Add {name} to /etc/hosts")
        return
    except OSError as error:
        value = f"{name} does not resolve ({error.strerror})"
        yield Finding("host name", "warn", value, f"Add {name} to /etc/hosts. {advice}".strip())
        return
    value = f"{name} is {address}"
    if interface:
        value += f", default route through {interface}"
    if ipaddress.ip_address(address).is_loopback and interface:
        yield Finding("host name", "warn", f"{value}: unseen by other hosts", advice)
    else:
        yield Finding("host name", "ok", value)


def check_interface_variables() -> Iterator[Finding]:
    """Check that the interfaces that the user has named exist."""
    existing = [name for _, name in socket.if_nameindex()]
    for variable in _VARIABLES:
        text = os.environ.get(variable)
        if not text:
            continue
        # NCCL takes prefixes, exclusions (^) and exact names (=); gloo takes exact names.
        parts = [part.strip() for part in text.lstrip("^=").split(",")]
        exact = not variable.startswith("NCCL") or text.startswith("=")
        unknown = [
            part
            for part in parts
            if not any(name == part or (not exact and name.startswith(part)) for name in existing)
        ]
        if unknown and not text.startswith("^"):
            remedy = f"Name one of {', '.join(existing)}, or unset {variable}"
            value = f"{text}: no interface {', '.join(unknown)}"
            yield Finding(variable, "fail", value, remedy)
        else:
            yield Finding(variable, "ok", text)


def default_interface(routes: Path = _ROUTES) -> str | None:
    """Return the interface of the default IPv4 route; None if there is none.

    Args:
        routes: The kernel's routing table (Linux); columns are interface, destination, ....
    """
    if not routes.exists():
        return None
    for line in routes.read_text().splitlines()[1:]:
        columns = line.split()
        if len(columns) > 7 and columns[1] == columns[7] == "00000000":  # noqa: PLR2004
            return columns[0]
    return None


def within(seconds: float, call: Callable[[], str]) -> str:
    """Return a call's result.

    Args:
        seconds: Time limit. The system's resolver has none of its own that could be set.
        call: What to do, in a thread that is left behind when it is late.

    Raises:
        TimeoutError: It took longer.
    """
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        return pool.submit(call).result(seconds)
    finally:
        pool.shutdown(wait=False)
