# SPDX-License-Identifier: Apache-2.0
"""OmniReduce (SIGCOMM'21) with dedicated aggregators: processes that hold no gradient.

Workers push non-zero blocks to the aggregator of their slot, and get the union back. The protocol
is `benchmarks.sparse.peers.streaming_protocol`; messages over MPI need none of its retransmission.
A worker's link carries d S up and u S down whatever the number of workers. The aggregators' links
must carry that for all workers: `SparseRequest.run` makes them together as fast as all workers'.
"""

from __future__ import annotations

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
        blocks, slots = request.numel // request.block, _SLOTS_PER_AGGREGATOR * request.aggregators
        width = max(blocks // (slots * _DEPTH), 1)
        count = (request.ranks, slots, width)
        self._lanes = _DedicatedLanes(blocks, *count, num_aggregators=request.aggregators)

    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Push this worker's blocks, and write the sums."""
        nonzero = np.zeros(len(table), np.bool_)
        nonzero[blocks.numpy()] = True
        worker = Worker(self._lanes, nonzero)
        sent = [self._push(message, table) for message in worker.start(self.transport.rank)]
        while not worker.done:
            _, reply, rows = self._receive()
            table[torch.from_numpy(reply.blocks)] = rows
            answer = worker.answer(reply)
            if answer is not None:
                sent.append(self._push(answer, table))
        for exchange in sent:
            exchange.wait()

    def close(self) -> None:
        """Leave the transport, which is everyone's, open."""

    def aggregate(self) -> None:
        """Sum the blocks of one `sum` of all workers, in rank order, and send the union back."""
        aggregator = Aggregator(self._lanes, self.transport.rank)
        arrived: dict[int, dict[int, Tensor]] = {}
        sent = []
        while not aggregator.done:
            peer, message, rows = self._receive()
            arrived.setdefault(message.slot, {})[peer] = rows
            reply = aggregator.receive(peer, message)
            if reply is not None:
                sums = _sum(reply, arrived.pop(message.slot), self.block)
                sent.append(self._send(reply.message, sums, range(self._lanes.num_ranks)))
        for exchange in sent:
            exchange.wait()

    def _push(self, message: Message, table: Tensor) -> Exchange:
        rows = table[torch.from_numpy(message.blocks)]
        return self._send(message, rows, [self._lanes.owner(message.slot)])

    def _send(self, message: Message, rows: Tensor, peers: range | list[int]) -> Exchange:
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


def _sum(reply: Reply, arrived: dict[int, Tensor], block: int) -> Tensor:
    sums = torch.zeros(reply.message.blocks.size, block)
    for worker in sorted(arrived):
        here = np.flatnonzero(reply.sources[worker] >= 0)
        places = torch.from_numpy(reply.sources[worker, here])
        sums.index_add_(0, torch.from_numpy(here), arrived[worker][places])
    return sums
