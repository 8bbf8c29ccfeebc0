# SPDX-License-Identifier: Apache-2.0
"""Messages of the streaming protocol as they travel: numbers and blocks in one block of memory."""

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
    """Pieces of the host's memory (*frames*), each for one message.

    A frame begins with int64 numbers: slot, kind, k, then k numbers of blocks and k next ones. The
    blocks begin at the next multiple of their size, so that kernels can count in blocks all over
    the memory, and blocks are summed where they were received.

    Args:
        number: Frames.
        width: The most blocks of a message.
        block: Elements per block.
        dtype: Of the elements.
        scratch: Memory to use.
    """

    def __init__(
        self, number: int, width: int, block: int, dtype: torch.dtype, scratch: Scratch
    ) -> None:
        self._block_bytes = block * dtype.itemsize
        self._block = block
        # Numbers must begin at a multiple of their 8 bytes, whatever the size of a block.
        self._frame_blocks = -(-(self._header_blocks(width) + width) // 8) * 8
        like = torch.empty(0, dtype=dtype)
        self.memory = scratch("frames", number * self._frame_blocks * block, like)
        self._rows = self.memory.view(number, -1)
        self._bytes = self._rows.view(torch.uint8).numpy()
        # The last one given back is taken first: it is still in the cache.
        self._free = list(range(number))

    def take(self) -> int:
        """Return a frame that is not in use."""
        return self._free.pop()

    def give_back(self, frame: int) -> None:
        """Let a frame be used for something else."""
        self._free.append(frame)

    def whole(self, frame: int) -> Tensor:
        """Return all of a frame, to receive any message."""
        return self._rows[frame]

    def write(self, frame: int, message: Message) -> Tensor:
        """Write a message's numbers.

        Args:
            frame: Where.
            message: What.

        Returns:
            What must be sent once the blocks have been written too.
        """
        count = message.blocks.size
        numbers = self._bytes[frame, : 8 * (_FIXED + 2 * count)].view(np.int64)
        numbers[:_FIXED] = message.slot, message.kind, count
        numbers[_FIXED : _FIXED + count] = message.blocks
        numbers[_FIXED + count :] = message.nexts
        return self._rows[frame, : (self._header_blocks(count) + count) * self._block]

    def read(self, frame: int) -> Message:
        """Return a message that was received; a copy of its numbers."""
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
        """Return where in `memory` the blocks of a message of so many begin, in blocks."""
        return frame * self._frame_blocks + self._header_blocks(count)

    def _header_blocks(self, count: int) -> int:
        return -(-8 * (_FIXED + 2 * count) // self._block_bytes)
