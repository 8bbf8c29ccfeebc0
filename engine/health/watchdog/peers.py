# SPDX-License-Identifier: Apache-2.0
"""How watchdogs ask each other: a line of JSON over TCP, apart from all that training uses."""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import socketserver
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from wavemare.engine.health.watchdog.status import PeerAddress, UnreachablePeer
from wavemare.engine.launch.environment import host_address
from wavemare.errors import LaunchError

__all__ = ["LOOPBACK", "Server", "ask", "ask_all", "reachable_address"]

logger = logging.getLogger("wavemare")

LOOPBACK = "127.0.0.1"

_LIMIT = 1 << 20  # bytes of a line
# TCP sends a lost packet again after a second; a busy rank answers late.
_ANSWER_S = 3.0
_AT_ONCE = 64

Request = dict[str, Any]


class Server(socketserver.ThreadingTCPServer):
    """Answers requests that know the job's token, on a free port of all addresses.

    Args:
        token: Returns the secret that the ranks of a job share.
        answer: Maps a request to its answer; both are JSON objects.
    """

    daemon_threads = True
    request_queue_size = 128
    closing = False

    def __init__(self, token: Callable[[], str], answer: Callable[[Request], Request]) -> None:
        super().__init__(("", 0), _Conversation)
        self.token, self.answer = token, answer

    def wake(self) -> None:
        """End the wait for a request; no further one is answered."""
        self.closing = True
        with suppress(OSError):
            socket.create_connection((LOOPBACK, self.server_address[1]), _ANSWER_S).close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a request is answered."""
        return not self.closing

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore what a stranger sends, and callers that hang up."""
        logger.debug("the watchdog could not answer", exc_info=True)


class _Conversation(socketserver.StreamRequestHandler):
    timeout = _ANSWER_S

    def handle(self) -> None:
        server: Any = self.server
        request = json.loads(self.rfile.readline(_LIMIT))
        known = server.token()
        if known and hmac.compare_digest(str(request.pop("token", "")).encode(), known.encode()):
            self.wfile.write(json.dumps(server.answer(request)).encode() + b"\n")


def ask(peer: PeerAddress, token: str, request: Request) -> Request | UnreachablePeer:
    """Return a rank's answer, or that it gave none within 3 seconds."""
    try:
        with socket.create_connection((peer.address, peer.port), _ANSWER_S) as connection:
            connection.sendall(json.dumps({**request, "token": token}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(_LIMIT)
        if not line:
            return UnreachablePeer(peer, gone=True)  # it was killed just now
        answer: Request = json.loads(line)
        return answer
    except ConnectionError:
        return UnreachablePeer(peer, gone=True)
    except (OSError, ValueError):
        return UnreachablePeer(peer, gone=False)


def ask_all(
    peers: Sequence[PeerAddress], token: str, request: Request
) -> list[Request | UnreachablePeer]:
    """Ask many ranks, 64 at a time; the answers are in the order of the ranks."""
    if not peers:
        return []
    with ThreadPoolExecutor(min(len(peers), _AT_ONCE)) as pool:
        return list(pool.map(partial(ask, token=token, request=request), peers))


def reachable_address() -> str:
    """Return the address of this host that the other ranks reach."""
    environment = os.environ
    address = LOOPBACK
    # The master's name may be unknown here, or of IPv6 alone.
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment.get("MASTER_ADDR", LOOPBACK), 9))  # sends nothing
        address = str(probe.getsockname()[0])
    # LOCAL_SIZE is set by DeepSpeed's launcher.
    here = environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE"))
    one_host = here is not None and here == environment.get("WORLD_SIZE")
    if not one_host and address.startswith("127."):
        with suppress(LaunchError):
            return host_address(environment)
    return address
