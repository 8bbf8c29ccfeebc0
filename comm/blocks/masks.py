# SPDX-License-Identifier: Apache-2.0
"""The non-zero blocks of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Bits", "Masks", "mask_bytes"]

Bits = npt.NDArray[np.uint8]


def mask_bytes(num_blocks: int) -> int:
    """Return the bytes of a bit-packed mask."""
    return -(-num_blocks // 8)


@dataclass(frozen=True, eq=False)
class Masks:
    """The non-zero blocks of one bucket on all ranks.

    Args:
        bits: (N, ceil(nb / 8)), uint8: each rank's bit-packed mask, little-endian in each byte.
        num_blocks: nb, the number of blocks of the bucket.
    """

    bits: Bits
    num_blocks: int

    @classmethod
    def of(cls, matrix: npt.ArrayLike) -> Masks:
        """Pack a matrix (N, nb) of truth values."""
        table = np.asarray(matrix, dtype=bool)
        return cls(np.packbits(table, axis=1, bitorder="little"), table.shape[1])

    @property
    def num_ranks(self) -> int:
        """N."""
        return self.bits.shape[0]

    @cached_property
    def matrix(self) -> npt.NDArray[np.bool_]:
        """(N, nb), bool: whether a rank's block is not zero."""
        unpacked = np.unpackbits(self.bits, axis=1, count=self.num_blocks, bitorder="little")
        return unpacked.view(bool)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """(N,), int64: the number of each rank's non-zero blocks."""
        return np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)

    @cached_property
    def union_size(self) -> int:
        """Number of blocks that are non-zero on some rank."""
        return int(np.bitwise_count(np.bitwise_or.reduce(self.bits, axis=0)).sum())

    @cached_property
    def union(self) -> npt.NDArray[np.int64]:
        """(U,), int64: the blocks that are non-zero on some rank, ascending."""
        return np.flatnonzero(self.matrix.any(axis=0))

    def of_rank(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's non-zero blocks, ascending."""
        return np.flatnonzero(self.matrix[rank])
