# SPDX-License-Identifier: Apache-2.0
"""The non-zero blocks of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bits = npt.NDArray[np.uint8]


def mask_bytes(num_blocks: int) -> int:
    """Return the bytes of a bit-packed mask."""
    return -(-num_blocks // 8)


def bits_of(blocks: Tensor, num_blocks: int) -> Tensor:
    """Return the bit-packed mask (ceil(nb / 8),), uint8, of a list of blocks in any order."""
    present = torch.zeros(num_blocks, dtype=torch.bool, device=blocks.device)
    present[blocks] = True
    return packed_bits(present)


def packed_bits(present: Tensor) -> Tensor:
    """Return the bit-packed mask (ceil(nb / 8),), uint8, of truth values (nb,)."""
    if present.device.type == "cpu":
        return torch.from_numpy(np.packbits(present.numpy(), bitorder="little"))
    values = present.new_zeros(8 * mask_bytes(len(present)), dtype=torch.uint8)
    values[: len(present)] = present
    places = torch.arange(8, dtype=torch.uint8, device=present.device)
    return (values.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def first_bit(bits: Tensor) -> int:
    """Return the number of the first bit that is set in a bit-packed mask; -1 if none is."""
    numbers = np.flatnonzero(np.unpackbits(bits.cpu().numpy(), bitorder="little"))
    return int(numbers[0]) if numbers.size else -1


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """How many blocks of one bucket are not zero; which ones is not known.

    Args:
        num_blocks: nb, the number of blocks of the bucket.
        counts: (N,), int64: the number of each rank's non-zero blocks.
        union_size: Number of blocks that are non-zero on some rank, or a lower bound.
    """

    num_blocks: int
    counts: npt.NDArray[np.int64]
    union_size: int

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.counts)


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

    @property
    def matrix(self) -> npt.NDArray[np.bool_]:
        """(N, nb), bool: whether a rank's block is not zero; 8 times as large as the masks."""
        return self._unpacked(self.bits)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """(N,), int64: the number of each rank's non-zero blocks."""
        return np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)

    @cached_property
    def union_size(self) -> int:
        """Number of blocks that are non-zero on some rank."""
        return int(np.bitwise_count(self._union_bits).sum())

    @cached_property
    def union(self) -> npt.NDArray[np.int64]:
        """(U,), int64: the blocks that are non-zero on some rank, ascending."""
        return np.flatnonzero(self._unpacked(self._union_bits))

    def of_rank(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's non-zero blocks, ascending."""
        return np.flatnonzero(self._unpacked(self.bits[rank]))

    def holds(
        self, blocks: npt.NDArray[np.int64], ranks: slice = slice(None)
    ) -> npt.NDArray[np.bool_]:
        """Return (ranks, k), bool: whether each of k blocks is non-zero on each of some ranks."""
        found = self.bits[ranks].take(blocks >> 3, axis=1)
        found >>= (blocks & 7).astype(np.uint8)
        found &= 1
        return found.view(bool)

    @cached_property
    def _union_bits(self) -> Bits:
        return np.bitwise_or.reduce(self.bits, axis=0)

    def _unpacked(self, bits: Bits) -> npt.NDArray[np.bool_]:
        return np.unpackbits(bits, axis=-1, count=self.num_blocks, bitorder="little").view(bool)
