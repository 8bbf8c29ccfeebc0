# SPDX-License-Identifier: Apache-2.0
"""Numbers as messages of few bits, and of the largest numbers alone.

The size of a message follows from the number of its numbers, so that no sizes travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 128
"""Numbers that share a scale, where all are sent."""
CHUNK = 4096
"""Numbers of which the largest are chosen, where only some are sent: an index has 12 bits."""
SPARSE_DECAY = 0.95
"""Of what waits for a later message where only the largest numbers are sent: old changes count
less."""
_FP32, _TWO = 32, 2
_INDICES, _INDEX_BYTES = 2, 3
"""Two indices of 12 bits lie in three bytes."""


@dataclass(frozen=True)
class Code:
    """How numbers are written.

    With 8 and 4 bits, a number is an integer times a scale. With 2 bits, it is a sign and one of
    two magnitudes: the means of the numbers below and above the mean magnitude. Each group, or the
    chosen numbers of each chunk, have scales of their own.

    Args:
        bits: Of a number: 32, 8, 4 or 2.
        top_k: How many numbers of each `CHUNK` are written, a multiple of 4; 0 for all.
    """

    bits: int
    top_k: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether numbers arrive as they are, so that nothing is left for the next message."""
        return self.bits == _FP32 and not self.top_k

    @property
    def share(self) -> float:
        """The bytes of a long message, beside those of its numbers in 32 bits."""
        return self.size(CHUNK) / (4 * CHUNK)

    def size(self, numel: int) -> int:
        """Return the bytes of a message."""
        rows = self._rows(numel)
        indices = self.top_k * _INDEX_BYTES // _INDICES
        scales, values = 4 * _num_scales(self.bits), (self.top_k or GROUP) * self.bits // 8
        return rows * (scales + indices + values)

    def encode(self, values: Tensor) -> Tensor:
        """Write numbers.

        Args:
            values: (E,), float32.

        Returns:
            (M,), uint8, of `size`. Numbers that are not finite stay so.
        """
        width = CHUNK if self.top_k else GROUP
        rows = functional.pad(values, (0, -values.numel() % width)).view(-1, width)
        indices = []
        if self.top_k:
            chosen = _largest(rows, self.top_k)
            # A zero has no sign. In its place the largest number stands once more.
            chosen = torch.where(rows.gather(1, chosen) == 0, chosen[:, :1], chosen)
            rows, indices = rows.gather(1, chosen), [_pack_indices(chosen)]
        scales, codes = _to_codes(rows, self.bits)
        return torch.cat([scales.reshape(-1).view(torch.uint8), *indices, _pack(codes, self.bits)])

    def encode_with(self, values: Tensor, residual: Tensor) -> Tensor:
        """Write numbers and what former messages have left out.

        Args:
            values: (E,), float32.
            residual: (E,), what was left out; then what this message leaves out.
        """
        residual.mul_(SPARSE_DECAY if self.top_k else 1.0).add_(values)
        message = self.encode(residual)
        residual -= self.decode(message, residual.numel())
        return message

    def decode(self, message: Tensor, numel: int) -> Tensor:
        """Return the numbers of an `encode`: (numel,), float32; zero where none was chosen."""
        rows, width, count = self._rows(numel), self.top_k or GROUP, _num_scales(self.bits)
        indices_size = rows * self.top_k * _INDEX_BYTES // _INDICES
        sizes = [4 * rows * count, indices_size, rows * width * self.bits // 8]
        scales, indices, codes = message.split(sizes)
        scales = scales.clone().view(torch.float32).view(rows, count)  # at an aligned address
        found = _from_codes(scales, _unpack(codes, self.bits).view(rows, width), self.bits)
        if self.top_k:
            places = _unpack_indices(indices).view(rows, width)
            found = found.new_zeros(rows, CHUNK).scatter_(1, places, found)
        return found.view(-1)[:numel]

    def _rows(self, numel: int) -> int:
        return -(-numel // (CHUNK if self.top_k else GROUP))


def _largest(rows: Tensor, count: int) -> Tensor:
    """Return the places of the largest numbers of rows, (R, count); of equal ones the first.

    Rounded numbers are often equal, and libraries choose differently among them.
    """
    last = rows.shape[1] - 1
    places = last - torch.arange(rows.shape[1], device=rows.device)
    keys = rows.abs().view(torch.int32).long() * (last + 1) + places
    return last - keys.topk(count, dim=1).values % (last + 1)


def _num_scales(bits: int) -> int:
    return {_FP32: 0, _TWO: 2}.get(bits, 1)


def _to_codes(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scales of rows, (R, 0 to 2) float32, and the codes of their numbers, (R, W)."""
    if bits == _FP32:
        return rows[:, :0].contiguous(), rows.contiguous()
    sizes = rows.abs()
    if bits == _TWO:
        # In fp64, so that the order of a sum does not change the scales.
        wide = sizes.double()
        large = wide >= wide.mean(1, keepdim=True)
        counts = large.sum(1)
        high = torch.where(large, wide, 0).sum(1) / counts.clamp_min(1)
        low = torch.where(large, 0, wide).sum(1) / (rows.shape[1] - counts).clamp_min(1)
        scales = torch.stack([low, high], 1).float()
        return scales, large.to(torch.uint8) | (rows < 0).to(torch.uint8) << 1
    top = 2 ** (bits - 1) - 1
    scales = sizes.amax(1, keepdim=True) / top
    tiny = torch.finfo(torch.float32).tiny
    codes = (rows / scales.clamp_min(tiny)).round_().clamp_(-top, top).nan_to_num_()
    return scales, codes.add_(top).to(torch.uint8)


def _from_codes(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Return the numbers of `_to_codes`: (R, W), float32."""
    if bits == _FP32:
        return codes
    if bits == _TWO:
        sizes = scales.gather(1, (codes & 1).long())
        return torch.where(codes > 1, -sizes, sizes)
    return codes.to(torch.float32).sub_(2 ** (bits - 1) - 1).mul_(scales)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes as bytes, the first one in the lowest bits."""
    if bits == _FP32:
        return codes.view(-1).view(torch.uint8)
    per = 8 // bits
    packed, *others = codes.view(-1, per).unbind(1)
    for place, part in enumerate(others, 1):
        packed = packed | part << (bits * place)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == _FP32:
        return packed.clone().view(torch.float32)
    shifts = range(0, 8, bits)
    return torch.stack([packed >> shift & 2**bits - 1 for shift in shifts], 1).view(-1)


def _pack_indices(indices: Tensor) -> Tensor:
    """Return indices below 4,096, an even number of them, as bytes."""
    first, second = indices.view(-1, _INDICES).int().unbind(1)
    parts = [first & 255, first >> 8 | (second & 15) << 4, second >> 4]
    return torch.stack(parts, 1).to(torch.uint8).view(-1)


def _unpack_indices(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(-1, _INDEX_BYTES).long().unbind(1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 1).view(-1)
