# SPDX-License-Identifier: Apache-2.0
"""Ending a process without the interpreter's shutdown, and so that its launcher notices."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

__all__ = ["leave_at_once", "leave_done", "tell_deaf_parent"]

# deepspeed --launcher mpich starts each rank by this script, which ends with 0 however it went.
_DEAF_PARENT = "deepspeed/launcher/launcher_helper.py"
_GLOO_THREAD = "pt_gloo"


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


def leave_done() -> None:
    """End a process that has done its work, with 0, if threads of gloo's are there; else return.

    Such a thread may still be giving back a tensor of Python's. If the interpreter shuts down at
    that moment, it ends the thread within C++, which aborts the process ("terminate called
    without an active exception"): a job that went well would look like one that did not.
    """
    if not any(name.startswith(_GLOO_THREAD) for name in _thread_names()):
        return
    # What the interpreter does first, by the only names there are: threads end, then handlers run.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _thread_names() -> Iterator[str]:
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread may end meanwhile
            yield file.read_text(encoding="utf-8")


def tell_deaf_parent() -> None:
    """End a parent that would report success, by a signal that ``mpirun`` cannot overlook."""
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:  # not Linux, or it has ended
        return
    if any(word.endswith(_DEAF_PARENT) for word in words):
        os.kill(parent, signal.SIGTERM)
