# SPDX-License-Identifier: Apache-2.0
"""Messages of the largest numbers alone, as in SparseLoCo.

Only the benchmark has them: replicas that send them lose too much (docs/results/slow-links.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from wavemare.engine.local_steps.codec import Code, from_codes, num_scales, pack, to_codes, unpack

CHUNK = 4096
"""Numbers of which the largest are chosen: an index has 12 bits."""
DECAY = 0.95
"""Of what waits for a later message: old changes count less."""
_INDICES, _INDEX_BYTES = 2, 3
"""Two indices lie in three bytes."""


@dataclass(frozen=True)
class SparseCode(Code):
    """As `Code`; the largest numbers of a chunk share their scales.

    Args:
        bits: Of a number: 8, 4 or 2.
        top_k: How many numbers of each chunk are written, a multiple of 4.
    """

    top_k: int

    def size(self, numel: int) -> int:
        """Return the bytes of a message."""
        return -(-numel // CHUNK) * sum(self._sizes())

    def encode(self, values: Tensor) -> Tensor:
        """Write numbers; see `Code`."""
        rows = functional.pad(values, (0, -values.numel() % CHUNK)).view(-1, CHUNK)
        chosen = _largest(rows, self.top_k)
        # A zero has no sign. In its place the largest number stands once more.
        chosen = torch.where(rows.gather(1, chosen) == 0, chosen[:, :1], chosen)
        scales, codes = to_codes(rows.gather(1, chosen), self.bits)
        scales = scales.reshape(-1).view(torch.uint8)
        return torch.cat([scales, _pack_indices(chosen), pack(codes, self.bits)])

    def encode_with(self, values: Tensor, residual: Tensor) -> Tensor:
        """Write numbers and what former messages have left out, which decays."""
        residual *= DECAY
        return super().encode_with(values, residual)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        """Return the numbers of an `encode`: (numel,), float32; zero where none was chosen."""
        rows = -(-numel // CHUNK)
        scales, indices, codes = message.split([rows * size for size in self._sizes()])
        scales = scales.clone().view(torch.float32).view(rows, num_scales(self.bits))
        found = from_codes(scales, unpack(codes, self.bits).view(rows, self.top_k), self.bits)
        places = _unpack_indices(indices).view(rows, self.top_k)
        return found.new_zeros(rows, CHUNK).scatter_(1, places, found).view(-1)[:numel]

    def _sizes(self) -> list[int]:
        """Return the bytes of a chunk's scales, indices and numbers."""
        indices = self.top_k // _INDICES * _INDEX_BYTES
        return [4 * num_scales(self.bits), indices, self.top_k * self.bits // 8]


def _largest(rows: Tensor, count: int) -> Tensor:
    """Return the places of the largest numbers of rows, (R, count); of equal ones the first.

    Rounded numbers are often equal, and libraries choose differently among them.
    """
    last = rows.shape[1] - 1
    places = last - torch.arange(rows.shape[1], device=rows.device)
    keys = rows.abs().view(torch.int32).long() * (last + 1) + places
    return last - keys.topk(count, dim=1).values % (last + 1)


def _pack_indices(indices: Tensor) -> Tensor:
    """Return indices below 4,096, an even number of them, as bytes."""
    first, second = indices.view(-1, _INDICES).int().unbind(1)
    parts = [first & 255, first >> 8 | (second & 15) << 4, second >> 4]
    return torch.stack(parts, 1).to(torch.uint8).view(-1)


def _unpack_indices(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(-1, _INDEX_BYTES).long().unbind(1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 1).view(-1)
