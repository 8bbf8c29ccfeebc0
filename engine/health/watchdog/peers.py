# SPDX-License-Identifier: Apache-2.0
"""How watchdogs ask each other: a line of JSON over TCP, apart from all that training uses."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from wavemare.engine.health.watchdog.status import PeerAddress, UnreachablePeer
from wavemare.engine.launch.environment import own_address
from wavemare.errors import LaunchError

__all__ = ["LOOPBACK", "ask", "ask_all", "listening_socket", "reachable_address", "serve"]

logger = logging.getLogger("wavemare")

LOOPBACK = "127.0.0.1"

_LIMIT = 1 << 20  # bytes of a line
# A packet that is lost is sent again after a second; a busy rank answers late.
_ANSWER_S = 3.0
_AT_ONCE = 64

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def listening_socket() -> socket.socket:
    """Return a socket on a free port of all of this host's addresses."""
    return socket.create_server(("", 0), backlog=128)


def reachable_address() -> str:
    """Return this host's address that the other ranks reach."""
    environment = os.environ
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((environment.get("MASTER_ADDR", LOOPBACK), 9))  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:  # a name that is not known here, or of IPv6 alone
        address = LOOPBACK
    # LOCAL_SIZE is that of DeepSpeed's launcher.
    here = environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE"))
    one_host = here is not None and here == environment.get("WORLD_SIZE")
    if one_host or not address.startswith("127."):
        return address
    try:
        return own_address(environment)
    except LaunchError:
        return address


async def serve(listener: socket.socket, token: Callable[[], str], answer: Answer) -> Any:
    """Answer requests that know the job's token, until the server that is returned is closed.

    Args:
        listener: From `listening_socket`.
        token: The secret that the ranks of a job share.
        answer: From a request to its answer, both JSON objects.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, TimeoutError, RecursionError):
            line = await asyncio.wait_for(reader.readline(), _ANSWER_S)
            request = json.loads(line)
            known = token()
            given = str(request.pop("token", "")) if isinstance(request, dict) else ""
            if known and hmac.compare_digest(given.encode(), known.encode()):
                writer.write(json.dumps(await answer(request)).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), _ANSWER_S)

    conversations: set[asyncio.Task[None]] = set()

    # Of a coroutine, Python 3.11's streams would report as an error that the loop ends meanwhile.
    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def end(task: asyncio.Task[None]) -> None:
            conversations.discard(task)
            writer.close()
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("the watchdog could not answer", exc_info=error)

        task = asyncio.get_running_loop().create_task(handle(reader, writer))
        conversations.add(task)
        task.add_done_callback(end)

    return await asyncio.start_server(begin, sock=listener, limit=_LIMIT)


async def ask(
    of: PeerAddress, token: str, request: dict[str, Any]
) -> dict[str, Any] | UnreachablePeer:
    """Return a rank's answer, or that it gave none within a moment."""
    try:
        return await asyncio.wait_for(_ask(of, token, request), _ANSWER_S)
    except (ConnectionError, EOFError):
        return UnreachablePeer(of, gone=True)
    except (OSError, TimeoutError, ValueError):
        return UnreachablePeer(of, gone=False)


async def _ask(of: PeerAddress, token: str, request: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(of.address, of.port, limit=_LIMIT)
    try:
        writer.write(json.dumps({**request, "token": token}).encode() + b"\n")
        line = await reader.readline()
        if not line:
            raise EOFError  # it was killed just now
        answer: dict[str, Any] = json.loads(line)
        return answer
    finally:
        writer.close()


async def ask_all(
    ranks: Sequence[PeerAddress], token: str, request: dict[str, Any]
) -> list[dict[str, Any] | UnreachablePeer]:
    """Ask many ranks, some at a time; the answers are in the order of the ranks."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(of: PeerAddress) -> dict[str, Any] | UnreachablePeer:
        async with turns:
            return await ask(of, token, request)

    return list(await asyncio.gather(*map(one, ranks)))
