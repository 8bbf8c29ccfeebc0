# SPDX-License-Identifier: Apache-2.0
"""Ranks ask the process that started them to change links or shares of a core.

A Unix socket carries one JSON value per request. Its path works on all emulated hosts, as they
share files, and the kernel tells the caller's process number as this process sees it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wavemare.errors import LaunchError

__all__ = ["ADDRESS", "ask", "serving"]

ADDRESS = "WAVEMARE_BENCH_REQUESTS"
"""Variable of ranks: the address that `serving` yields."""
_TIMEOUT_S = 60.0
_DONE = b"done"


@contextmanager
def serving(handle: Callable[[int, Any], None]) -> Iterator[str]:
    """Answer the requests of `ask`, one after the other, in a thread.

    Yields:
        The address, for the variable `ADDRESS` of the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="wavemare-requests-") as folder:
        address = str(Path(folder, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            thread = threading.Thread(target=_serve, args=(listener, handle), daemon=True)
            thread.start()
            try:
                yield address
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()


def ask(value: Any, timeout_s: float = _TIMEOUT_S) -> None:
    """Send a request to the address in the environment, and wait until it is done.

    Raises:
        LaunchError: It was not done.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.environ[ADDRESS])
            connection.sendall(json.dumps(value).encode() + b"\n")
            done = connection.recv(len(_DONE)) == _DONE
    except OSError:
        done = False
    if not done:
        reason = "the command that started this rank has not done it"
        raise LaunchError("request", value, reason, "Look at the command's output")


def _serve(listener: socket.socket, handle: Callable[[int, Any], None]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        with connection, connection.makefile("rb") as lines:
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
            )
            pid, _, _ = struct.unpack("3i", credentials)
            try:
                handle(pid, json.loads(lines.readline()))
            except Exception as error:  # the rank reports the failure
                print(f"error: {error}", flush=True)
            else:
                connection.sendall(_DONE)
