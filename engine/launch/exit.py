# SPDX-License-Identifier: Apache-2.0
"""Ending a process at once, with an exit code that its launcher sees."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

__all__ = ["end_mpich_helper", "exit_now", "wait_for_gloo"]

# deepspeed --launcher mpich starts each rank by this script, which always exits with 0.
_MPICH_HELPER = "deepspeed/launcher/launcher_helper.py"
_COLLECTIVES_SECONDS = 60.0
# Together longer than 5 ms, after which Python passes the interpreter to a waiting thread.
_CHECKS = 4
_CHECK_SECONDS = 0.003
_POLL_SECONDS = 0.02


def exit_now(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    With a process group or MPI alive, shutdown runs destructors that wait for the peers (gloo and
    NCCL join their threads, MPI_Finalize is collective), while the peers wait for this rank. Here
    the operating system closes the sockets, which the peers notice.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    end_mpich_helper()
    os._exit(code)


def wait_for_gloo() -> None:
    """Wait before the interpreter shuts down until gloo's threads hold no Python objects.

    After a collective, gloo's thread needs the interpreter to release its tensor. During shutdown
    that aborts the process ("terminate called without an active exception", pytorch#179291), and a
    successful job would fail. Pending collectives get up to a minute first, as the destructor of
    their process group would wait for them, too.
    """
    until = time.monotonic() + _COLLECTIVES_SECONDS
    while _gloo_threads() and _collectives_pending() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    still = 0
    while still < _CHECKS and (threads := _gloo_threads()) and time.monotonic() < until:
        time.sleep(_CHECK_SECONDS)  # lets them have the interpreter
        still = 0 if any(_is_awake(thread) for thread in threads) else still + 1


def _gloo_threads() -> list[Path]:
    threads = Path("/proc/self/task").glob("*")
    return [thread for thread in threads if _read(thread / "comm").startswith("pt_gloo")]


def _is_awake(thread: Path) -> bool:
    """Whether a thread runs or is ready to; a thread that waits for peers or work sleeps."""
    state = _read(thread / "stat").rpartition(") ")[2]
    return state[:1] == "R"


def _collectives_pending() -> bool:
    """Whether torch's flight recorder, of the last 2,000 collectives, has one that is not done.

    A recorder that is switched off (``TORCH_FR_BUFFER_SIZE=0``) has none.
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


def end_mpich_helper() -> None:
    """End DeepSpeed's helper for MPICH, which would report success, by a signal."""
    parent = os.getppid()
    words = _read(Path(f"/proc/{parent}/cmdline")).split("\0")
    if any(word.endswith(_MPICH_HELPER) for word in words):
        os.kill(parent, signal.SIGTERM)
