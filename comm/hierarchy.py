# SPDX-License-Identifier: Apache-2.0
"""Sums densely within each node, and sparsely between nodes."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors import CollectiveCall, equal_ranges, gather_ranges, reduce_ranges
from wavemare.comm.transport.base import Transport
from wavemare.errors import CommError


@dataclass(frozen=True)
class Hierarchy:
    """The ranks of this node, and the ranks with the same number on the other nodes.

    Within a node every rank sums a shard. Ranks with the same number then sum their shards
    sparsely, which uses all network interfaces of a node. Sums within a node are denser than a
    rank's gradient: 1 - (1-d)^G for G ranks with independent masks of density d.

    Args:
        within: Transport among the ranks of this node.
        between: Transport among the ranks with this number.
    """

    within: Transport
    between: Transport

    @classmethod
    def find(cls, transport: Transport) -> Hierarchy | None:
        """Find the nodes; collective over all ranks.

        Args:
            transport: Among all ranks.

        Returns:
            None if there is one node, or one rank per node.

        Raises:
            CommError: The nodes have different numbers of ranks.
        """
        colour = zlib.crc32(transport.host.encode())
        mine = torch.tensor([colour])
        table = mine.new_empty(transport.size, 1)
        transport.all_gather(mine, table)
        colours = table[:, 0].tolist()
        sizes = Counter(colours)
        if len(set(sizes.values())) > 1:
            raise CommError(
                "hierarchical",
                True,
                f"the nodes have different numbers of ranks: {sorted(sizes.values())}",
                "Start as many ranks on each node, or set it to false",
            )
        if len(sizes) in {1, transport.size}:
            return None
        number = colours[: transport.rank].count(colour)
        # MPI colours have 31 bits: use the node's first rank.
        return cls(transport.split(colours.index(colour)), transport.split(number))

    def all_reduce(
        self,
        sum_between: Callable[[CollectiveCall], None],
        call: CollectiveCall,
        masks: Masks | None = None,
    ) -> None:
        """Sum within the nodes, then the shards between them, and gather within the nodes.

        Args:
            sum_between: Sums a shard over the ranks of `between`.
            call: Over all ranks.
            masks: Not used: the shards have their own.
        """
        # Both steps scale: a node's sum may overflow 16 bits.
        parts = self.within.size if call.scale != 1 else 1
        ranges = equal_ranges(call.flat.numel(), call.block, self.within.size)
        within = replace(call, transport=self.within, scale=1 / parts, ranges=ranges)
        reduce_ranges(within)
        own = ranges[within.rank]
        shard, scale = call.flat[own.start : own.stop], call.scale * parts
        sum_between(replace(call, flat=shard, transport=self.between, scale=scale))
        gather_ranges(within)

    def close(self) -> None:
        """Close both transports."""
        self.within.close()
        self.between.close()
