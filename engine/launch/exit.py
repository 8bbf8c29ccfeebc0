# SPDX-License-Identifier: Apache-2.0
"""Ending a process so that its launcher notices how, whatever its threads are doing."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

__all__ = ["leave_at_once", "let_gloo_rest", "tell_deaf_parent"]

# deepspeed --launcher mpich starts each rank by this script, which ends with 0 however it went.
_DEAF_PARENT = "deepspeed/launcher/launcher_helper.py"
_COLLECTIVES_SECONDS = 60.0
# Together longer than the 5 ms after which a waiting thread makes Python hand the interpreter on.
_LOOKS = 4
_LOOK_SECONDS = 0.003
_ASK_SECONDS = 0.02


def leave_at_once(code: int) -> NoReturn:
    """End the process, whatever its threads are waiting for.

    With a process group or MPI alive, shutdown runs destructors that wait for the peers (gloo and
    NCCL join their threads, MPI_Finalize is collective), and a peer that waits for this rank never
    answers. The operating system closes the sockets instead, which is what the peers must notice.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    tell_deaf_parent()
    os._exit(code)


def let_gloo_rest() -> None:
    """Wait, before the interpreter shuts down, until gloo's threads have nothing of Python's.

    A thread that has done a collective gives its tensor back, for which it needs the interpreter.
    The interpreter's shutdown ends a thread that asks for it, within C++, which aborts the process
    ("terminate called without an active exception", pytorch#179291): a job that went well would
    look like one that did not. Collectives that nobody waits for come first, for a minute at
    most, as the destructor of their process group would wait, too.
    """
    until = time.monotonic() + _COLLECTIVES_SECONDS
    while _gloo_threads() and _collectives_under_way() and time.monotonic() < until:
        time.sleep(_ASK_SECONDS)
    still = 0
    while still < _LOOKS and (threads := _gloo_threads()) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)  # the interpreter is free for them
        still = 0 if any(_is_awake(thread) for thread in threads) else still + 1


def _gloo_threads() -> list[Path]:
    threads = Path("/proc/self/task").glob("*")
    return [thread for thread in threads if _read(thread / "comm").startswith("pt_gloo")]


def _is_awake(thread: Path) -> bool:
    """Whether a thread runs, or could; one that waits for its peers or for work sleeps."""
    state = _read(thread / "stat").rpartition(") ")[2]
    return state[:1] == "R"


def _collectives_under_way() -> bool:
    """Whether torch's flight recorder, which holds the last 2,000, knows one without an end.

    It knows none where it is switched off (``TORCH_FR_BUFFER_SIZE=0``).
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None or not hasattr(c10d, "_dump_fr_trace_json"):
        return False
    entries = json.loads(c10d._dump_fr_trace_json(True, True)).get("entries", ())
    return any(
        entry["profiling_name"].startswith("gloo:") and not (entry["is_p2p"] or entry["retired"])
        for entry in entries
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or the thread has ended
        return ""


def tell_deaf_parent() -> None:
    """End a parent that would report success, by a signal that ``mpirun`` cannot overlook."""
    parent = os.getppid()
    words = _read(Path(f"/proc/{parent}/cmdline")).split("\0")
    if any(word.endswith(_DEAF_PARENT) for word in words):
        os.kill(parent, signal.SIGTERM)
