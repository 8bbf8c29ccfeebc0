# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hostfile: lines ``HOST slots=N``."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wavemare.errors import LaunchError

__all__ = ["Host", "is_this_host_alone", "parse_hostfile", "read_hosts"]

_LINE = re.compile(r"^(\S+)\s+slots=(\d{1,9})(?!\d)(?P<rest>.*)$")
_REMEDY = "Write 'HOST slots=N', N being the number of ranks on that host"


@dataclass(frozen=True)
class Host:
    """A line of a hostfile.

    Attributes:
        name: The host's name, as ssh takes it.
        slots: Number of ranks.
    """

    name: str
    slots: int


def read_hosts(file: Path | None) -> list[Host]:
    """Return the hosts of a hostfile; none without a file.

    DeepSpeed itself would run on this host alone if the file does not exist.

    Raises:
        LaunchError: The file cannot be read, or a line is wrong.
    """
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
        raise LaunchError("--hostfile", str(file), reason, "Name an existing file") from None
    return parse_hostfile(text, str(file))


def parse_hostfile(text: str, file: str = "") -> list[Host]:
    """Read a hostfile as DeepSpeed does, but refuse what DeepSpeed would ignore.

    Args:
        text: Lines ``HOST slots=N``, empty lines and comments (``#``).
        file: Its name, for errors.

    Raises:
        LaunchError: A line is wrong, or there is no host.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        problem, remedy = None, _REMEDY
        match = _LINE.match(entry)
        if match is None:
            problem = f"{entry[:80]!r} is not a host with its slots"
        elif match["rest"] and not match["rest"].lstrip().startswith("#"):
            problem, remedy = f"deepspeed ignores {match['rest'].strip()!r}", "Remove it"
        elif int(match[2]) == 0:
            problem = f"{match[1]} has no slots"
        elif match[1] in hosts:
            problem, remedy = f"{match[1]} is listed twice", "Join the two lines"
        if match is None or problem is not None:
            raise LaunchError("--hostfile", file, f"line {number}: {problem}", remedy)
        hosts[match[1]] = Host(match[1], int(match[2]))
    if not hosts:
        raise LaunchError("--hostfile", file, "it names no host", _REMEDY)
    return list(hosts.values())


def is_this_host_alone(hosts: Sequence[Host]) -> bool:
    """Whether a hostfile names only this host, where ranks start without ssh."""
    here = ("localhost", "127.0.0.1", socket.gethostname())
    return len(hosts) == 1 and hosts[0].name in here
