# SPDX-License-Identifier: Apache-2.0
"""Whether a process still runs, as far as this one can know. Imports the standard library alone."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["process_has_ended", "process_start", "process_state", "this_machine"]


def this_machine() -> str:
    """Return what says where this process's number counts: host, boot and container.

    The name alone does not, as another machine may be ``localhost``, too; nor does the boot, which
    machines share that go on from one snapshot.
    """
    boot = container = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        container = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {container}"


def process_state(pid: int) -> str:
    """Return the letter for what a process does; empty if there is none, ``?`` if unknown."""
    fields = _stat(pid)
    return fields[0] if fields else "" if fields is None else "?"


def process_start(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot; 0 if unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def process_has_ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not asked for its code yet."""
    return process_state(pid) in ("", "Z", "X")


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None if there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return []
