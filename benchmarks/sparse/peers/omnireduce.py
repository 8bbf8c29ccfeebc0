# SPDX-License-Identifier: Apache-2.0
"""OmniReduce (SIGCOMM'21): dedicated aggregators, which hold no gradient, or the ranks as these.

Workers push non-zero blocks to the aggregator of their slot, and get the union back. The protocol
is `benchmarks.sparse.peers.streaming_protocol`; messages over MPI need none of its retransmission.
A worker's link carries d S up and u S down whatever the number of workers. The aggregators' links
must carry that for all workers: `SparseRequest.run` makes them together as fast as all workers'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.sparse.peers.base import AnySource, Peer
from benchmarks.sparse.peers.streaming_protocol import (
    Aggregator,
    Lanes,
    Message,
    MessageKind,
    Reply,
    Worker,
)
from benchmarks.sparse.request import SparseRequest
from wavemare.comm.transport.base import Exchange

_SLOTS_PER_AGGREGATOR = 2
_DEPTH = 32
"""Blocks of a lane; its first block travels even if it is zero."""
_WIDTH = 512
"""Most lanes of a slot, where ranks aggregate."""
_FIXED = 3
"""Numbers that each message has: slot, kind and number of blocks."""


@dataclass(frozen=True)
class _DedicatedLanes(Lanes):
    """Lanes whose slots belong to the ranks behind those of the workers."""

    num_aggregators: int = 1

    def owner(self, slot: int) -> int:
        return self.num_ranks + slot % self.num_aggregators


class OmniReduce(Peer):
    """Ranks 0 to N-1 are workers and call `sum`; K more are aggregators and call `aggregate`.

    Args:
        name: "omnireduce".
        transport: Among workers and aggregators.
        request: Has N and K.
    """

    transport: AnySource

    def __init__(self, name: str, transport: AnySource, request: SparseRequest) -> None:
        super().__init__(name, transport, request)
        self._lanes = self._cut(request)

    def _cut(self, request: SparseRequest) -> Lanes:
        blocks, slots = request.numel // request.block, _SLOTS_PER_AGGREGATOR * request.aggregators
        width = max(blocks // (slots * _DEPTH), 1)
        count = (request.ranks, slots, width)
        return _DedicatedLanes(blocks, *count, num_aggregators=request.aggregators)

    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Push this worker's blocks, and write the sums."""
        self._run(table, self._worker(table, blocks))

    def close(self) -> None:
        """Leave the transport, which is everyone's, open."""

    def aggregate(self) -> None:
        """Sum the blocks of one `sum` of all workers, in rank order, and send the union back."""
        self._run(torch.empty(0), Aggregator(self._lanes, self.transport.rank))

    def _worker(self, table: Tensor, blocks: Tensor) -> Worker:
        nonzero = np.zeros(len(table), np.bool_)
        nonzero[blocks.numpy()] = True
        return Worker(self._lanes, nonzero)

    def _run(self, table: Tensor, *parts: Worker | Aggregator) -> set[int]:
        """Answer messages until this rank's parts are done; return the ranks that have ended."""
        rank = self.transport.rank
        worker = next((part for part in parts if isinstance(part, Worker)), None)
        aggregator = next((part for part in parts if isinstance(part, Aggregator)), None)
        own: deque[tuple[int, Message, Tensor]] = deque()
        arrived: dict[int, dict[int, Tensor]] = {}
        ended: set[int] = set()
        sent = []

        def send(message: Message, rows: Tensor, peers: Sequence[int]) -> None:
            if rank in peers:
                own.append((rank, message, rows))
            others = [peer for peer in peers if peer != rank]
            if others:
                sent.append(self._send(message, rows, others))

        def push(message: Message) -> None:
            rows = table[torch.from_numpy(message.blocks)]
            send(message, rows, [self._lanes.owner(message.slot)])

        for message in worker.start(rank) if worker else ():
            push(message)
        while own or not all(part.done for part in parts):
            peer, message, rows = own.popleft() if own else self._receive()
            if message.kind == MessageKind.END:
                ended.add(peer)
            elif message.kind == MessageKind.DOWN:
                assert worker is not None
                table[torch.from_numpy(message.blocks)] = rows
                answer = worker.answer(message)
                if answer is not None:
                    push(answer)
            else:
                assert aggregator is not None
                arrived.setdefault(message.slot, {})[peer] = rows
                reply = aggregator.receive(peer, message)
                if reply is not None:
                    sums = _sum(reply, arrived.pop(message.slot), self.block)
                    send(reply.message, sums, range(self._lanes.num_ranks))
        for exchange in sent:
            exchange.wait()
        return ended

    def _send(self, message: Message, rows: Tensor, peers: Sequence[int]) -> Exchange:
        """Send numbers, int64, and blocks behind them."""
        fixed = (message.slot, message.kind, message.blocks.size)
        numbers = torch.from_numpy(np.concatenate((fixed, message.blocks, message.nexts)))
        frame = torch.cat((numbers.view(torch.uint8), rows.flatten().view(torch.uint8)))
        exchange = self.transport.begin()
        for peer in peers:
            exchange.send(peer, frame)
        return exchange

    def _receive(self) -> tuple[int, Message, Tensor]:
        """Return the next message, its sender and its blocks (k, block)."""
        width = self._lanes.width
        frame = torch.empty(8 * (_FIXED + 2 * width) + 4 * self.block * width, dtype=torch.uint8)
        peer = self.transport.receive_any(frame)
        slot, kind, count = frame[: 8 * _FIXED].view(torch.int64).tolist()
        end = 8 * (_FIXED + 2 * count)
        numbers = frame[8 * _FIXED : end].view(torch.int64).numpy()
        rows = frame[end : end + 4 * self.block * count].view(torch.float32)
        self.transport.bytes_down += end + rows.nbytes
        message = Message(slot, MessageKind(kind), numbers[:count], numbers[count:])
        return peer, message, rows.view(count, self.block)


class Streaming(OmniReduce):
    """The ranks aggregate, as OmniReduce's colocated aggregators; arguments as for `Peer`.

    Each rank sends (N-1)/N (d + u) of the bucket in each direction, in many small messages.
    """

    def _cut(self, request: SparseRequest) -> Lanes:
        blocks, slots = request.numel // request.block, _SLOTS_PER_AGGREGATOR * self.transport.size
        width = min(max(blocks // (slots * _DEPTH), 1), _WIDTH)
        return Lanes(blocks, self.transport.size, slots, width)

    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Stream until all ranks have all sums.

        A rank that still receives from any peer would otherwise receive of the next call.
        """
        parts = self._worker(table, blocks), Aggregator(self._lanes, self.transport.rank)
        ended = self._run(table, *parts)
        none = np.empty(0, np.int64)
        peers = self.transport.peers()
        exchange = self._send(Message(0, MessageKind.END, none, none), table[:0], peers)
        for peer in set(peers) - ended:
            exchange.receive(peer, torch.empty(8 * _FIXED, dtype=torch.uint8))
        exchange.wait()

    def close(self) -> None:
        """Close the transport."""
        self.transport.close()


def _sum(reply: Reply, arrived: dict[int, Tensor], block: int) -> Tensor:
    sums = torch.zeros(reply.message.blocks.size, block)
    for worker in sorted(arrived):
        here = np.flatnonzero(reply.sources[worker] >= 0)
        places = torch.from_numpy(reply.sources[worker, here])
        sums.index_add_(0, torch.from_numpy(here), arrived[worker][places])
    return sums
