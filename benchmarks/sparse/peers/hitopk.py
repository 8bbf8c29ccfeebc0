# SPDX-License-Identifier: Apache-2.0
"""HiTopKComm with MSTopK (MLSys'21): sum within hosts densely, send the top k between hosts.

Each rank of a host sums a shard of the bucket. Ranks with the same shard gather each other's k
elements of largest magnitude, with error feedback. The ranks of a host then share their shards.
So the top k are chosen of a host's sum, where wavemare's compressor chooses blocks of each rank's
gradient, before the sum within its host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.sparse.peers.base import Peer, borders, gather
from benchmarks.sparse.request import TOPK_SHARE, SparseRequest
from wavemare.comm.transport import Transport

_SAMPLINGS = 30


class HiTopK(Peer):
    """On hosts of ``--ranks-per-host``; if that is 1, on pairs of ranks as if these were hosts."""

    def __init__(self, name: str, transport: Transport, request: SparseRequest) -> None:
        super().__init__(name, transport, request)
        size = request.ranks_per_host
        if size == 1 and transport.size % 2 == 0:
            size = 2
        self._within = transport.split(transport.rank // size)
        self._between = transport.split(transport.rank % size)
        self._residual: Tensor | None = None
        self._start = 0

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far, within hosts and between them."""
        both = self._within, self._between
        return sum(each.bytes_up for each in both), sum(each.bytes_down for each in both)

    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Sum what is chosen; all ranks get the same bits."""
        flat = table.view(-1)
        edges = borders(flat.numel(), self._within.size)
        parts = list(flat.split(np.diff(edges).tolist()))
        shard = self._sum_shard(parts)
        if self._residual is not None:
            shard += self._residual
        ids = ms_topk(shard.abs(), max(1, round(TOPK_SHARE * len(shard))))
        sent = shard[ids]
        self._start, self._residual = edges[self._within.rank], shard.index_fill(0, ids, 0.0)
        shard.zero_()
        for chosen, values in gather(self._between, (ids.int(), sent)):
            shard.index_add_(0, chosen, values)
        self._within.all_gather_parts(parts)

    def _sum_shard(self, parts: list[Tensor]) -> Tensor:
        """Return this rank's part, summed over its host in rank order, in place."""
        within = self._within
        own = parts[within.rank]
        received = own.new_empty(within.size, len(own))
        exchange = within.begin()
        for peer in within.peers():
            exchange.receive(peer, received[peer])
            exchange.send(peer, parts[peer])
        received[within.rank] = own
        exchange.wait()
        own.zero_()
        for term in received:
            own += term
        return own

    def left_out(self) -> Tensor | None:
        """Return the residual of this rank's shard."""
        if self._residual is None:
            return None
        lacking = torch.zeros_like(self.bucket)
        lacking[self._start : self._start + len(self._residual)] = self._residual
        return lacking

    def reset(self) -> None:
        """Drop the residual."""
        self._residual = None

    def close(self) -> None:
        """Close both groups too."""
        super().close()
        self._within.close()
        self._between.close()


def ms_topk(magnitudes: Tensor, k: int) -> Tensor:
    """Return k indices of nearly the largest of (n,) magnitudes, by MSTopK.

    A bisection looks for a threshold that k elements exceed. If none is found in time, elements of
    the last interval fill up what is missing, in the order of their positions.
    """
    low, high = 0.0, float(magnitudes.max())
    for _ in range(_SAMPLINGS):
        middle = (low + high) / 2
        count = int((magnitudes > middle).sum())
        if count == k:
            return (magnitudes > middle).nonzero().flatten()
        low, high = (middle, high) if count > k else (low, middle)
    above = magnitudes > high
    interval = (magnitudes >= low) & ~above
    missing = k - int(above.sum())
    return torch.cat((above.nonzero().flatten(), interval.nonzero().flatten()[:missing]))
