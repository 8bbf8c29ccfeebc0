# SPDX-License-Identifier: Apache-2.0
"""Streams blocks to aggregators and sums back, without an exchange of masks.

See `wavemare.comm.executors.streaming_protocol`. Each rank is worker and aggregator, as with
OmniReduce's colocated aggregators. Messages are handled in the order of arrival.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, Scratch
from wavemare.comm.executors.streaming_protocol import (
    Aggregator,
    Lanes,
    Message,
    MessageKind,
    Reply,
    Worker,
)
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


def streaming(call: CollectiveCall, masks: Masks | None = None) -> None:
    """Stream until all sums are there.

    Sends (N-1)/N (d + u) of the bucket in each direction, in many small messages. Sums overlap with
    messages and no rank waits for masks, which helps on slow links with many ranks. On fast links,
    handling the messages takes longer than sending the bytes.
    """
    blocks, slots = call.num_blocks, _SLOTS_PER_RANK * call.size
    lanes = Lanes(blocks, call.size, slots, min(max(blocks // (slots * _DEPTH), 1), _WIDTH))
    bits = call.mask().cpu().numpy()
    with call.phase("plan"):
        nonzero = np.unpackbits(bits, count=blocks, bitorder="little").astype(np.bool_)
        stream = _Stream(call, lanes, nonzero)
    stream.run()


class _Stream:
    """One call of one rank: runs its worker and its aggregator."""

    def __init__(self, call: CollectiveCall, lanes: Lanes, nonzero: npt.NDArray[np.bool_]) -> None:
        self._call = call
        self._lanes = lanes
        self._worker = Worker(lanes, nonzero)
        self._aggregator = Aggregator(lanes, call.rank)
        # One frame to receive and one for the end; per slot one message up; per owned slot the
        # contributions of all ranks and the pending replies.
        owned = -(-lanes.num_slots // call.size)
        frames = 2 + lanes.num_slots + owned * (call.size + lanes.answer_interval + 1)
        self._frames = _Frames(frames, lanes.width, call.block, call.flat.dtype, call.scratch)
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
        for message in self._worker.start(self._call.rank + 1):
            self._send_up(message)
        while True:
            while self._own:
                self._contribute(self._call.rank, *self._own.popleft())
            if self._worker.done and self._aggregator.done:
                break
            self._receive()
        self._end()

    def _receive(self) -> None:
        with self._call.phase("push"):
            frame = self._arrival
            peer = self._call.transport.receive_any(self._frames.whole(frame))
            message = self._frames.read(frame)
            self._call.transport.bytes_down += self._frames.num_bytes(message)
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
        with self._call.phase("pack"):
            self._gather(message.blocks, self._frames.blocks(frame, message.blocks.size))
        owner = self._lanes.owner(message.slot)
        if owner == self._call.rank:
            self._own.append((message, frame))
            return
        with self._call.phase("push"):
            exchange = self._call.transport.begin()
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
        call, message = self._call, reply.message
        sent = self._down[message.slot]
        if reply.all_answered:
            # All replies so far were received: this does not wait.
            self._free(sent)
        frame = self._frames.take()
        data = self._frames.write(frame, message)
        contributions = self._contributions[message.slot]
        with call.phase("reduce"):
            firsts = np.zeros((call.size, 1), dtype=np.int64)
            for worker, (_, position) in contributions.items():
                firsts[worker] = position
            positions = np.where(reply.sources < 0, -1, reply.sources + firsts)
            summed = self._frames.blocks(frame, message.blocks.size)
            memory, host = self._frames.memory, kernels_for("cpu")
            host.reduce(memory, torch.from_numpy(positions), call.block, call.scale, summed)
        with call.phase("pull"):
            exchange = call.transport.begin()
            for peer in call.transport.peers():
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
        with self._call.phase("unpack"):
            self._scatter(self._frames.blocks(frame, message.blocks.size), message.blocks)
        answer = self._worker.answer(message)
        if answer is not None:
            self._send_up(answer)

    def _end(self) -> None:
        """Wait until all ranks have received all messages.

        A rank that still receives from any peer would otherwise receive the next collective.
        """
        call, frames = self._call, self._frames
        none = np.empty(0, dtype=np.int64)
        data = frames.write(frames.take(), Message(0, MessageKind.END, none, none))
        ends = call.scratch("ends", call.size * data.numel(), data).view(call.size, -1)
        with call.phase("push"):
            exchange = call.transport.begin()
            for peer in call.transport.peers():
                if peer not in self._ended:
                    exchange.receive(peer, ends[peer])
                exchange.send(peer, data)
            exchange.wait()
            for sent in self._down.values():
                self._free(sent)

    def _free(self, messages: list[_Sent]) -> None:
        while messages:
            frame, exchange = messages.pop()
            with self._call.phase("pull"):
                exchange.wait()
            self._frames.give_back(frame)

    def _gather(self, blocks: npt.NDArray[np.int64], packed: Tensor) -> None:
        call = self._call
        on_device = self._staged(packed)
        call.kernels.gather(call.flat, call.block, call.index(blocks), on_device)
        if on_device is not packed:
            packed.copy_(on_device)

    def _scatter(self, packed: Tensor, blocks: npt.NDArray[np.int64]) -> None:
        call = self._call
        on_device = self._staged(packed)
        if on_device is not packed:
            on_device.copy_(packed)
        call.kernels.scatter(on_device, call.block, call.index(blocks), call.flat)

    def _staged(self, packed: Tensor) -> Tensor:
        """Return memory on the bucket's device for blocks of a frame, which is on the host."""
        if self._call.flat.device == packed.device:
            return packed
        return self._call.scratch("streamed", packed.numel(), self._call.flat)


class _Frames:
    """Equal parts of the host's memory (*frames*), each for one message.

    A frame starts with int64 numbers: slot, kind, k, k block numbers and k next ones. The blocks
    start at the next multiple of their size, so kernels can address the whole memory in blocks and
    sum blocks where they were received.

    Args:
        number: Frames.
        width: Most blocks of a message.
        block: Elements per block.
        dtype: Of the elements.
        scratch: Memory to use.
    """

    def __init__(
        self, number: int, width: int, block: int, dtype: torch.dtype, scratch: Scratch
    ) -> None:
        self._block_bytes = block * dtype.itemsize
        self._block = block
        # Numbers must be aligned to 8 bytes for any block size.
        self._frame_blocks = -(-(self._header_blocks(width) + width) // 8) * 8
        like = torch.empty(0, dtype=dtype)
        self.memory = scratch("frames", number * self._frame_blocks * block, like)
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
        """Return the (count * block,) elements of a message's blocks."""
        start = self._header_blocks(count) * self._block
        return self._rows[frame, start : start + count * self._block]

    def position(self, frame: int, count: int) -> int:
        """Return the first block of a message of ``count`` blocks in `memory`, in blocks."""
        return frame * self._frame_blocks + self._header_blocks(count)

    def _header_blocks(self, count: int) -> int:
        return -(-8 * (_FIXED + 2 * count) // self._block_bytes)
