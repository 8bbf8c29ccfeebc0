# SPDX-License-Identifier: Apache-2.0
"""Dense sums within a node, sparse ones between nodes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from wavemare.comm.transport.base import Transport
from wavemare.errors import CommError

__all__ = ["Hierarchy"]


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
    def find(cls, transport: Transport, node: str | None = None) -> Hierarchy | None:
        """Find the nodes; collective over all ranks.

        Args:
            transport: Among all ranks.
            node: This rank's node; the machine's name if omitted.

        Returns:
            None if there is one node, or one rank per node.

        Raises:
            CommError: The nodes have different numbers of ranks.
        """
        colour = zlib.crc32((transport.host if node is None else node).encode())
        mine = torch.tensor([colour], device=transport.message_device)
        table = mine.new_empty(transport.size, 1)
        transport.all_gather(mine, table)
        colours = table[:, 0].tolist()
        sizes = {other: colours.count(other) for other in colours}
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

    def close(self) -> None:
        """Close both transports."""
        self.within.close()
        self.between.close()
