# SPDX-License-Identifier: Apache-2.0
"""How a bucket is cut into the lanes and slots of the streaming protocol."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Lanes"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """How a bucket is cut into slots; the same on all ranks.

    Args:
        num_blocks: Blocks of the bucket.
        num_ranks: N.
        max_slots: Slots if there are blocks for so many.
        width: Lanes of a slot, and so the most blocks of a message.
        patience: Replies of a slot from one at which all workers answer to the next.
    """

    num_blocks: int
    num_ranks: int
    max_slots: int
    width: int
    patience: int = 8

    @property
    def count(self) -> int:
        """L; a lane whose number is beyond the bucket has no block."""
        return self.max_slots * self.width

    @property
    def num_slots(self) -> int:
        """Slots that have a block."""
        return -(-min(self.num_blocks, self.count) // self.width)

    def owner(self, slot: int) -> int:
        """Return the rank that aggregates a slot."""
        return slot % self.num_ranks

    def first_blocks(self, slot: int) -> Index:
        """Return the first block of each lane of a slot, which is also the lane's number."""
        start = slot * self.width
        return np.arange(start, min(start + self.width, self.num_blocks), dtype=np.int64)

    def columns(self, blocks: Index) -> Index:
        """Return the positions of blocks' lanes within their slot; also of a lane's end."""
        return blocks % self.count % self.width

    def first_nonzero_from(self, nonzero: npt.NDArray[np.bool_]) -> Index:
        """Return for each block the first one of its lane that is not zero, itself included.

        Args:
            nonzero: (num_blocks,), bool.

        Returns:
            (n,), int64, long enough for the number that comes after any block in its lane. Where
            nothing is left, a lane has its own number beyond the bucket.
        """
        rows = -(-self.num_blocks // self.count)
        numbers = np.arange((rows + 1) * self.count, dtype=np.int64)
        # The row behind the last one holds the lanes' ends.
        found = np.tile(numbers[rows * self.count :], rows + 1)
        found[: self.num_blocks][nonzero] = numbers[: self.num_blocks][nonzero]
        backwards = found.reshape(rows + 1, self.count)[::-1]
        np.minimum.accumulate(backwards, axis=0, out=backwards)
        return found
