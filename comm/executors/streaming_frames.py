# SPDX-License-Identifier: Apache-2.0
"""Serialized messages of the streaming protocol: numbers and blocks in one block of memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.executors.base import Scratch
from wavemare.comm.executors.streaming_protocol import Message, MessageKind

__all__ = ["Frames"]

_FIXED = 3
"""Numbers that each message has: slot, kind and number of blocks."""


class Frames:
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
