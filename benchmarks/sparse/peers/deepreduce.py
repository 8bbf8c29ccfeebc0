# SPDX-License-Identifier: Apache-2.0
"""DeepReduce (NeurIPS'21): indices and values of a sparse tensor are coded apart.

Indices are a bitmap of the non-zero blocks, values have 8 or 4 bits and a scale for each block.
All ranks gather both and add in rank order. Each rank's error waits for its next step.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.sparse.peers.base import Pairs, Peer, decode, encode, encoded
from benchmarks.sparse.request import SparseRequest
from wavemare.comm.transport import Transport


class DeepReduce8(Peer):
    """Values in 8 bits: sends (N-1) d / 4 of a bucket."""

    bits: ClassVar[int] = 8

    def __init__(self, name: str, transport: Transport, request: SparseRequest) -> None:
        super().__init__(name, transport, request)
        self._random = np.random.default_rng(transport.rank)
        self._residual: Pairs | None = None

    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Sum gradients and residuals; the coding's error becomes the new residual."""
        transport, block = self.transport, self.block
        if self._residual is not None:
            table.index_add_(0, *self._residual)
            blocks = torch.unique(torch.cat((blocks, self._residual[0])))
        present = np.zeros(len(table), np.bool_)
        present[blocks.numpy()] = True
        masks = torch.empty(transport.size, -(-len(table) // 8), dtype=torch.uint8)
        transport.all_gather(torch.from_numpy(np.packbits(present)), masks)
        found = np.unpackbits(masks.numpy(), axis=1, count=len(table))
        chosen = [torch.from_numpy(np.flatnonzero(row)) for row in found]
        parts = [encoded(len(ids) * block, block, self.bits) for ids in chosen]
        own = table[blocks]
        parts[transport.rank] = encode(own.flatten(), block, self.bits, self._random)
        for tensors in zip(*parts, strict=True):
            transport.all_gather_parts(tensors)
        table[blocks] = 0
        for rank, (ids, (codes, scales)) in enumerate(zip(chosen, parts, strict=True)):
            rows = decode(codes, scales, len(ids) * block, block, self.bits).view(-1, block)
            table.index_add_(0, ids, rows)
            if rank == transport.rank:
                self._residual = blocks, own - rows

    def left_out(self) -> Tensor | None:
        """Return the residual."""
        if self._residual is None:
            return None
        lacking = torch.zeros_like(self.bucket).view(-1, self.block)
        lacking[self._residual[0]] = self._residual[1]
        return lacking.flatten()

    def reset(self) -> None:
        """Drop the residual."""
        self._residual = None


class DeepReduce4(DeepReduce8):
    """Values in 4 bits: sends (N-1) d / 8 of a bucket."""

    bits = 4
