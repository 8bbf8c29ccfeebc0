# SPDX-License-Identifier: Apache-2.0
"""Who owns which block, and where each one lies in which message.

All of it follows from the masks of all ranks, so that no rank has to be told anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wavemare.comm.blocks.masks import Masks

__all__ = ["Layout", "Piece", "deal", "gathered", "owned_ranges"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layout:
    """The blocks that travel, grouped by owner, and ascending within each group.

    Args:
        blocks: (B,), int64: the numbers of the blocks. One may stand in two groups where owners
            share a block (see `owned_ranges`).
        edges: (N + 1,), int64: the owner o's group is ``blocks[edges[o]:edges[o + 1]]``.
        present: (N, B), bool: whether the source rank has that block, which is to say sends it.
    """

    blocks: Index
    edges: Index
    present: npt.NDArray[np.bool_]

    @property
    def num_ranks(self) -> int:
        """N."""
        return self.present.shape[0]

    def group(self, owner: int) -> slice:
        """Return the place of an owner's group within `blocks`."""
        return slice(int(self.edges[owner]), int(self.edges[owner + 1]))

    def pushed(self, source: int, owner: int) -> Index:
        """Return the blocks that a rank sends to an owner, in the order of the message."""
        group = self.group(owner)
        return self.blocks[group][self.present[source, group]]

    def chunks(self, count: int) -> list[Layout]:
        """Cut each owner's group into parts: one layout of the first parts, one of the second, ...

        Args:
            count: How many.
        """
        if count == 1:
            return [self]
        cuts = np.linspace(self.edges[:-1], self.edges[1:], count + 1).astype(np.int64)
        layouts = []
        for starts, stops in pairwise(cuts):
            index = np.concatenate(
                [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
            )
            edges = np.concatenate([[0], np.cumsum(stops - starts)])
            layouts.append(Layout(self.blocks[index], edges, self.present[:, index]))
        return layouts

    def push_counts(self) -> Index:
        """Return (N sources, N owners), int64: the blocks of each message, one's own included."""
        running = np.zeros((self.num_ranks, self.blocks.size + 1), dtype=np.int64)
        np.cumsum(self.present, axis=1, out=running[:, 1:])
        return running[:, self.edges[1:]] - running[:, self.edges[:-1]]

    def places(self, owner: int) -> Index:
        """Return where an owner finds the blocks that it must sum.

        Returns:
            (N, m), int64: for each rank and owned block its number within the messages of all
            ranks, one after the other by rank; -1 where the rank has sent none.
        """
        present = self.present[:, self.group(owner)]
        # Messages stand one after the other, each in the order of the group.
        number = np.cumsum(present.ravel(), dtype=np.int64).reshape(present.shape) - 1
        return np.where(present, number, -1)


def deal(masks: Masks) -> Layout:
    """Give each block of the union an owner such that all owners have alike to do.

    Blocks are sorted by their multiplicity (the number of ranks that have them) and dealt round
    robin, so that each owner gets as many of each multiplicity, but for one: what is pushed to it
    and what is pulled from it are both balanced (Zen, OSDI'25, asks for that of hashing; with the
    masks of all ranks at hand it is exact).
    """
    num_ranks = masks.num_ranks
    present = masks.matrix[:, masks.union]
    multiplicity = present.sum(axis=0, dtype=np.min_scalar_type(num_ranks))
    order = np.argsort(multiplicity, kind="stable")
    dealt = [np.sort(order[owner::num_ranks]) for owner in range(num_ranks)]
    order = np.concatenate(dealt) if order.size else order
    edges = np.cumsum([0, *(len(group) for group in dealt)], dtype=np.int64)
    return Layout(masks.union[order], edges, present[:, order])


@dataclass(frozen=True)
class Piece:
    """A range of a bucket's elements that one rank owns.

    Args:
        start: First element.
        stop: Element after the last.
        owner: Rank.
    """

    start: int
    stop: int
    owner: int


def owned_ranges(masks: Masks, block: int, pieces: Sequence[Piece]) -> Layout:
    """Give blocks the owners that a partition of the elements says.

    A block on a border belongs to both its owners: both get and sum all of it.

    Args:
        masks: Of all ranks.
        block: Elements per block.
        pieces: Ranges that do not overlap; blocks in none of them do not travel.
    """
    groups = []
    any_rank = masks.matrix.any(axis=0)
    for owner in range(masks.num_ranks):
        covered = np.zeros(masks.num_blocks, dtype=bool)
        for piece in pieces:
            if piece.owner == owner and piece.stop > piece.start:
                covered[piece.start // block : -(-piece.stop // block)] = True
        groups.append(np.flatnonzero(covered & any_rank))
    blocks = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
    edges = np.cumsum([0, *(len(group) for group in groups)], dtype=np.int64)
    return Layout(blocks, edges, masks.matrix[:, blocks])


def gathered(masks: Masks) -> Layout:
    """Return the layout by which every rank gets all blocks of all ranks: one group, the union."""
    blocks = masks.union
    edges = np.array([0, blocks.size], dtype=np.int64)
    return Layout(blocks, edges, masks.matrix[:, blocks])
