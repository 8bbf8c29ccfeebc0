# SPDX-License-Identifier: Apache-2.0
"""The non-zero blocks of all ranks; who owns them, and where each lies in each message.

Everything follows from the masks of all ranks, so the ranks exchange nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavemare.comm.kernels import compiled
from wavemare.comm.transport.base import Transport
from wavemare.errors import ConfigError

Bits = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]


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
    counts: Index
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
    def counts(self) -> Index:
        """(N,), int64: the number of each rank's non-zero blocks."""
        return np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)

    @cached_property
    def union_size(self) -> int:
        """Number of blocks that are non-zero on some rank."""
        return int(np.bitwise_count(self._union_bits).sum())

    @cached_property
    def union(self) -> Index:
        """(U,), int64: the blocks that are non-zero on some rank, ascending."""
        return np.flatnonzero(self._unpacked(self._union_bits))

    def of_rank(self, rank: int) -> Index:
        """Return a rank's non-zero blocks, ascending."""
        return np.flatnonzero(self._unpacked(self.bits[rank]))

    def holds(self, blocks: Index, ranks: slice = slice(None)) -> npt.NDArray[np.bool_]:
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


def begin_masks(transport: Transport, bits: Tensor, num_blocks: int) -> Callable[[], Masks]:
    """Begin to exchange the masks of all ranks; the result waits for them.

    Args:
        transport: To the other ranks.
        bits: (ceil(nb / 8),), uint8: this rank's mask, on the bucket's device or on the host.
        num_blocks: nb.
    """
    table = torch.empty(transport.size, mask_bytes(num_blocks), dtype=torch.uint8)
    gathering = transport.begin_gather(bits, table)

    def finish() -> Masks:
        gathering.wait()
        return Masks(table.numpy(), num_blocks)

    return finish


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks that travel, grouped by owner, ascending within each group.

    Args:
        blocks: (B,), int64: block numbers. A block that two owners share is in both groups (see
            `assign_ranges`).
        edges: (N + 1,), int64: the group of owner o is ``blocks[edges[o]:edges[o + 1]]``.
        masks: Of all ranks: a rank sends the blocks that are not zero there.
    """

    blocks: Index
    edges: Index
    masks: Masks

    def group(self, owner: int) -> slice:
        """Return the slice of `blocks` that an owner has."""
        return slice(int(self.edges[owner]), int(self.edges[owner + 1]))

    def pushed(self, source: int, owner: int | None = None) -> Index:
        """Return the blocks that a rank sends to an owner, or to all in turn, in message order."""
        blocks = self.blocks if owner is None else self.blocks[self.group(owner)]
        return blocks[self.masks.holds(blocks, slice(source, source + 1))[0]]

    def chunks(self, count: int) -> list[BlockLayout]:
        """Split each group into ``count`` parts; layout i has the i-th part of each group."""
        if count == 1:
            return [self]
        cuts = np.linspace(self.edges[:-1], self.edges[1:], count + 1).astype(np.int64)
        return [
            BlockLayout(
                self.blocks[_spans(starts, stops)],
                np.concatenate([[0], np.cumsum(stops - starts)]),
                self.masks,
            )
            for starts, stops in pairwise(cuts)
        ]

    def push_counts(self, sources: slice = slice(None)) -> Index:
        """Return (senders, N owners), int64: blocks per message, also of a rank to itself.

        Args:
            sources: Senders; by default all N ranks.
        """
        present = self.masks.holds(self.blocks, sources)
        counts = np.zeros((len(present), self.edges.size - 1), dtype=np.int64)
        some = np.flatnonzero(np.diff(self.edges))  # `reduceat` knows no empty groups
        if some.size:
            counts[:, some] = np.add.reduceat(present, self.edges[some], axis=1, dtype=np.int64)
        return counts

    def arriving_counts(self, owner: int) -> Index:
        """Return (N,), int64: the blocks that each rank sends to an owner."""
        return np.count_nonzero(self.masks.holds(self.blocks[self.group(owner)]), axis=1)

    def sources(self, owner: int) -> Index:
        """Return where an owner finds the blocks that it sums.

        Returns:
            (N, m), int64: for each rank and owned block, the block's number in the concatenated
            messages of all ranks, from the owner's own on; -1 where the rank sent none.
        """
        found: Index = _find_sources(self.masks.bits, self.blocks[self.group(owner)], owner)
        return found


@compiled
def _find_sources(bits: Any, blocks: Any, first: int) -> Any:
    """Return the table of `BlockLayout.sources`; in numpy it would take ten passes over it."""
    found = np.empty((len(bits), blocks.size), np.int64)
    number = 0
    # Messages stand one after the other, each in the order of the group.
    for step in range(len(bits)):
        rank = (first + step) % len(bits)
        row, numbers = bits[rank], found[rank]
        for column in range(blocks.size):
            present = (row[blocks[column] >> 3] >> (blocks[column] & 7)) & 1
            numbers[column] = number if present else -1
            number += present
    return found


def _spans(starts: Index, stops: Index) -> Index:
    """Return the numbers of some ranges, ``range(start, stop)``, one range after the other."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum(), dtype=np.int64) + np.repeat(starts - before, lengths)


def assign_owners(masks: Masks) -> BlockLayout:
    """Assign each block of the union to an owner so that every rank sends and receives the same.

    Blocks are sorted by the number of ranks that have them and assigned round robin. Owners thus
    differ by at most one block of each multiplicity, which balances push and pull (Zen, OSDI'25,
    balances both by hashing).
    """
    blocks, edges = _deal(masks.bits, _LANES)
    return BlockLayout(blocks, edges, masks)


_LANES = np.array(
    [sum((byte >> bit & 1) << 8 * bit for bit in range(8)) for byte in range(256)], np.uint64
)
"""Each bit of a byte in a byte of its own, so that eight blocks are counted by one addition."""
_MOST_IN_LANES = 255


@compiled
def _deal(bits: Any, lanes: Any) -> Any:
    """Return the blocks of `assign_owners` and their edges, by counting instead of sorting."""
    ranks = len(bits)
    multiplicity = np.zeros(8 * bits.shape[1], np.uint16)
    counts = np.empty(bits.shape[1], np.uint64)
    for first in range(0, ranks, _MOST_IN_LANES):
        counts[:] = 0
        for rank in range(first, min(first + _MOST_IN_LANES, ranks)):
            row = bits[rank]
            for byte in range(counts.size):
                counts[byte] += lanes[row[byte]]
        multiplicity += counts.view(np.uint8)
    # Where the next block of each multiplicity stands in the sorted order.
    place = np.zeros(ranks + 2, np.int64)
    for count in multiplicity:
        place[count + 1] += 1
    place[1] = 0  # blocks that no rank has
    place = np.cumsum(place)
    union = place[-1]
    edges = np.zeros(ranks + 1, np.int64)
    for owner in range(ranks):
        edges[owner + 1] = edges[owner] + (union - owner + ranks - 1) // ranks
    dealt, end = np.empty(union, np.int64), edges.copy()
    for block, count in enumerate(multiplicity):
        if count:
            owner = place[count] % ranks
            place[count] += 1
            dealt[end[owner]] = block
            end[owner] += 1
    return dealt, edges


class OwnedRange(NamedTuple):
    """A range of a bucket's elements that one rank owns.

    Args:
        start: First element.
        stop: Element after the last.
        owner: Rank.
    """

    start: int
    stop: int
    owner: int


def ranges_of(partition: Sequence[Any] | Index, numel: int, num_ranks: int) -> Index:
    """Return a partition as ranges, (n, 3): start, stop and owner of each.

    Args:
        partition: `OwnedRange`s, or the N + 1 borders of one range for each rank.
        numel: Elements of the bucket.
        num_ranks: N.

    Raises:
        ConfigError: Ranges overlap, or lie outside of the bucket.
    """
    given = np.array(partition, dtype=np.int64)
    if given.ndim == 1 and given.size:
        if given.size != num_ranks + 1:
            reason = f"it has {given.size - 1} ranges for {num_ranks} ranks"
            raise ConfigError("partition", partition, reason, f"Give {num_ranks + 1} borders")
        given = np.stack([given[:-1], given[1:], np.arange(num_ranks)], axis=1)
    ranges = given.reshape(-1, 3)
    starts, stops, owners = ranges[np.lexsort(ranges.T[1::-1])].T
    inside = (starts >= 0) & (starts <= stops) & (stops <= numel)
    inside &= (owners >= 0) & (owners < num_ranks)
    if not inside.all() or (stops[:-1] > starts[1:]).any():
        reason = f"its ranges overlap or lie outside of {numel} elements and {num_ranks} ranks"
        raise ConfigError("partition", partition, reason, "Give ranges that do not overlap")
    return ranges


def assign_ranges(masks: Masks, block: int, ranges: Index) -> BlockLayout:
    """Assign blocks to owners by a partition of the elements.

    A block on a border belongs to both owners: both receive and sum all of it.

    Args:
        masks: Of all ranks.
        block: Elements per block.
        ranges: From `ranges_of`; blocks in none of them do not travel.
    """
    starts, stops, owners = ranges[ranges[:, 1] > ranges[:, 0]].T
    order = np.lexsort((starts, owners))
    starts, stops, owners = starts[order] // block, -(-stops[order] // block), owners[order]
    first, last = np.searchsorted(masks.union, starts), np.searchsorted(masks.union, stops)
    blocks, owner = masks.union[_spans(first, last)], np.repeat(owners, last - first)
    # Two ranges of an owner may share a block.
    once = np.ones(blocks.size, dtype=bool)
    once[1:] = (blocks[1:] != blocks[:-1]) | (owner[1:] != owner[:-1])
    edges = np.searchsorted(owner[once], np.arange(masks.num_ranks + 1))
    return BlockLayout(blocks[once], edges, masks)


def gathered(masks: Masks) -> BlockLayout:
    """Return the layout of a gather to all ranks: one group, the union."""
    return BlockLayout(masks.union, np.array([0, masks.union.size], dtype=np.int64), masks)
