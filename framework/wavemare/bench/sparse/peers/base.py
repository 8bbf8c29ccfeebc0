# SPDX-License-Identifier: Apache-2.0
"""A system of a paper, over our transports; float32, on CPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from wavemare.bench.sparse.request import SparseRequest
from wavemare.comm.transport import Transport

Summation = Callable[[Tensor, Tensor, Transport], None]
"""Sums a bucket in place: its blocks (nb, block), the numbers of the non-zero ones, transport."""


class Peer(ABC):
    """A collective on one rank; all ranks build it together.

    Args:
        transport: Among all ranks.
        request: Has the elements per block, which divide a bucket.
    """

    def __init__(self, transport: Transport, request: SparseRequest) -> None:
        self.transport = transport
        self.block = request.block

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self.transport.bytes_up, self.transport.bytes_down

    @abstractmethod
    def sum(self, table: Tensor, blocks: Tensor) -> None:
        """Replace a bucket by the sum over all ranks.

        Args:
            table: (nb, block), its blocks.
            blocks: (k,), int64, ascending: the blocks that are not zero on this rank.
        """

    def left_out(self, numel: int) -> Tensor | None:
        """Return what the last sum lacks because of this rank; None if it is exact.

        The sums of these over all ranks, and the sum of the buckets, differ by rounding alone if
        there was no residual before.

        Args:
            numel: E.
        """
        return None

    def reset(self) -> None:
        """Drop the residual."""
        return None

    def close(self) -> None:
        """Close what it has opened."""
        return None


def plain(function: Summation) -> type[Peer]:
    """Return the class of a system that is exact and keeps no state."""

    class Plain(Peer):
        def sum(self, table: Tensor, blocks: Tensor) -> None:
            function(table, blocks, self.transport)

    return Plain
