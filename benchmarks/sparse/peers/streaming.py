# SPDX-License-Identifier: Apache-2.0
"""OmniReduce's protocol (SIGCOMM'21) with the ranks as aggregators, as its colocated ones.

See `benchmarks.sparse.peers.streaming_protocol`. No masks are exchanged; messages are handled in
the order of arrival. Each rank sends (N-1)/N (d + u) of the bucket in each direction, in many small
messages. Sums overlap with messages; on fast links, handling the messages takes longer than sending
the bytes.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
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
from wavemare.comm.executors.base import Scratch
from wavemare.comm.kernels import kernels_for
from wavemare.comm.transport.base import Exchange

_Sent = tuple[int, Exchange]
"""The frame of a pending message, and the message."""

_SLOTS_PER_RANK = 2
"""Slots that each rank aggregates: pending messages of each worker."""
_WIDTH = 512
"""Most lanes of a slot."""
_DEPTH = 16
"""Least blocks of a lane, if there are enough; its first block travels even if it is zero."""
_FIXED = 3
"""Numbers that each message has: slot, kind and number of blocks."""


class Streaming(Peer):
    """Streams blocks to the aggregators of their slots, and sums back; arguments as for `Peer`."""

    transport: AnySource

    def __init__(self, name: str, transport: AnySource, request: SparseRequest) -> None:
        super().__init__(name, transport, request)
        self._scratch = Scratch()

    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Stream until all sums are there."""
        slots = _SLOTS_PER_RANK * self.transport.size
        width = min(max(len(table) // (slots * _DEPTH), 1), _WIDTH)
        lanes = Lanes(len(table), self.transport.size, slots, width)
        nonzero = np.zeros(len(table), np.bool_)
        nonzero[blocks.numpy()] = True
        _Stream(self.transport, table, lanes, nonzero, self._scratch).run()


class _Stream:
    """One sum of one rank: runs its worker and its aggregator."""

    def __init__(
        self,
        transport: AnySource,
        table: Tensor,
        lanes: Lanes,
        nonzero: npt.NDArray[np.bool_],
        scratch: Scratch,
    ) -> None:
        self._transport = transport
        self._table = table
        self._lanes = lanes
        self._worker = Worker(lanes, nonzero)
        self._aggregator = Aggregator(lanes, transport.rank)
        # One frame to receive and one for the end; per slot one message up; per owned slot the
        # contributions of all ranks and the pending replies.
        owned = -(-lanes.num_slots // transport.size)
        number = 2 + lanes.num_slots + owned * (transport.size + lanes.answer_interval + 1)
        self._frames = _Frames(number, lanes.width, table.shape[1], scratch)
        self._arrival = self._frames.take()
        self._own: deque[tuple[Message, int]] = deque()
        self._up: dict[int, _Sent] = {}
        self._down: dict[int, list[_Sent]] = {slot: [] for slot in range(lanes.num_slots)}
        # By owned slot and rank: the frame, and the position of its first block.
        self._contributions: dict[int, dict[int, tuple[int, int]]] = {
            slot: {} for slot in range(lanes.num_slots)
        }
        self._ended: set[int] = set()

    def run(self) -> None:
        """Send the first messages, answer all messages, and end together with the other ranks."""
        for message in self._worker.start(self._transport.rank + 1):
            self._send_up(message)
        while True:
            while self._own:
                self._contribute(self._transport.rank, *self._own.popleft())
            if self._worker.done and self._aggregator.done:
                break
            self._receive()
        self._end()

    def _receive(self) -> None:
        frame = self._arrival
        peer = self._transport.receive_any(self._frames.whole(frame))
        message = self._frames.read(frame)
        self._transport.bytes_down += self._frames.num_bytes(message)
        if message.kind == MessageKind.UP:
            self._arrival = self._frames.take()
            self._contribute(peer, message, frame)
        elif message.kind == MessageKind.DOWN:
            self._store(message, frame)
        else:
            self._ended.add(peer)

    def _send_up(self, message: Message) -> None:
        frame = self._frames.take()
        data = self._frames.write(frame, message)
        torch.index_select(
            self._table,
            0,
            torch.from_numpy(message.blocks),
            out=self._frames.blocks(frame, message.blocks.size),
        )
        owner = self._lanes.owner(message.slot)
        if owner == self._transport.rank:
            self._own.append((message, frame))
            return
        exchange = self._transport.begin()
        exchange.send(owner, data)
        exchange.start()
        self._up[message.slot] = frame, exchange

    def _contribute(self, worker: int, message: Message, frame: int) -> None:
        position = self._frames.position(frame, message.blocks.size)
        self._contributions[message.slot][worker] = frame, position
        reply = self._aggregator.receive(worker, message)
        if reply is not None:
            self._reply(reply)

    def _reply(self, reply: Reply) -> None:
        message = reply.message
        sent = self._down[message.slot]
        if reply.all_answered:
            # All replies so far were received: this does not wait.
            self._free(sent)
        frame = self._frames.take()
        data = self._frames.write(frame, message)
        contributions = self._contributions[message.slot]
        firsts = np.zeros((self._transport.size, 1), dtype=np.int64)
        for worker, (_, position) in contributions.items():
            firsts[worker] = position
        positions = torch.from_numpy(np.where(reply.sources < 0, -1, reply.sources + firsts))
        summed = self._frames.blocks(frame, message.blocks.size).view(-1)
        block = self._table.shape[1]
        kernels_for("cpu").reduce(self._frames.memory, positions, block, 1.0, summed)
        exchange = self._transport.begin()
        for peer in self._transport.peers():
            exchange.send(peer, data)
        exchange.start()
        sent.append((frame, exchange))
        for used, _ in contributions.values():
            self._frames.give_back(used)
        contributions.clear()
        self._store(message, frame)

    def _store(self, message: Message, frame: int) -> None:
        if message.slot in self._up:
            # Received before the reply was sent: this does not wait.
            self._free([self._up.pop(message.slot)])
        sums = self._frames.blocks(frame, message.blocks.size)
        self._table.index_copy_(0, torch.from_numpy(message.blocks), sums)
        answer = self._worker.answer(message)
        if answer is not None:
            self._send_up(answer)

    def _end(self) -> None:
        """Wait until all ranks have received all messages.

        A rank that still receives from any peer would otherwise receive the next collective.
        """
        none = np.empty(0, dtype=np.int64)
        data = self._frames.write(self._frames.take(), Message(0, MessageKind.END, none, none))
        ends = data.new_empty(self._transport.size, data.numel())
        exchange = self._transport.begin()
        for peer in self._transport.peers():
            if peer not in self._ended:
                exchange.receive(peer, ends[peer])
            exchange.send(peer, data)
        exchange.wait()
        for sent in self._down.values():
            self._free(sent)

    def _free(self, messages: list[_Sent]) -> None:
        while messages:
            frame, exchange = messages.pop()
            exchange.wait()
            self._frames.give_back(frame)


class _Frames:
    """Equal parts of the host's memory (*frames*), each for one message.

    A frame starts with int64 numbers: slot, kind, k, k block numbers and k next ones. The blocks
    start at the next multiple of their size, so kernels can address the whole memory in blocks and
    sum blocks where they were received.

    Args:
        number: Frames.
        width: Most blocks of a message.
        block: Elements per block, float32.
        scratch: Memory to use.
    """

    def __init__(self, number: int, width: int, block: int, scratch: Scratch) -> None:
        self._block_bytes = block * torch.float32.itemsize
        self._block = block
        # Numbers must be aligned to 8 bytes for any block size.
        self._frame_blocks = -(-(self._header_blocks(width) + width) // 8) * 8
        self.memory = scratch("frames", number * self._frame_blocks * block, torch.empty(0))
        self._rows = self.memory.view(number, -1)
        self._bytes = self._rows.view(torch.uint8).numpy()
        # Reuse the last freed frame first: it is still in the cache.
        self._free = list(range(number))

    def take(self) -> int:
        """Return a free frame."""
        return self._free.pop()

    def give_back(self, frame: int) -> None:
        """Free a frame."""
        self._free.append(frame)

    def whole(self, frame: int) -> Tensor:
        """Return the whole frame, to receive a message."""
        return self._rows[frame]

    def write(self, frame: int, message: Message) -> Tensor:
        """Write a message's numbers into a frame.

        Returns:
            The part of the frame to send once the blocks are written.
        """
        count = message.blocks.size
        numbers = self._bytes[frame, : 8 * (_FIXED + 2 * count)].view(np.int64)
        numbers[:_FIXED] = message.slot, message.kind, count
        numbers[_FIXED : _FIXED + count] = message.blocks
        numbers[_FIXED + count :] = message.nexts
        return self._rows[frame, : (self._header_blocks(count) + count) * self._block]

    def read(self, frame: int) -> Message:
        """Return a received message; its numbers are copied."""
        slot, kind, count = self._bytes[frame, : 8 * _FIXED].view(np.int64).tolist()
        numbers = self._bytes[frame, 8 * _FIXED : 8 * (_FIXED + 2 * count)].view(np.int64).copy()
        return Message(slot, MessageKind(kind), numbers[:count], numbers[count:])

    def num_bytes(self, message: Message) -> int:
        """Return the bytes of a message with its blocks."""
        count = message.blocks.size
        return (self._header_blocks(count) + count) * self._block_bytes

    def blocks(self, frame: int, count: int) -> Tensor:
        """Return a message's blocks, (count, block)."""
        start = self._header_blocks(count) * self._block
        return self._rows[frame, start : start + count * self._block].view(count, self._block)

    def position(self, frame: int, count: int) -> int:
        """Return the first block of a message of ``count`` blocks in `memory`, in blocks."""
        return frame * self._frame_blocks + self._header_blocks(count)

    def _header_blocks(self, count: int) -> int:
        return -(-8 * (_FIXED + 2 * count) // self._block_bytes)
