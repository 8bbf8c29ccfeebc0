# SPDX-License-Identifier: Apache-2.0
"""Numbers as messages of few bits.

The size of a message follows from the number of its numbers, so that no sizes travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 128
"""Numbers that share their scales."""
_FP32, _TWO = 32, 2
_LONG = 1024 * GROUP


@dataclass(frozen=True)
class Code:
    """How numbers are written.

    With 8 and 4 bits, a number is an integer times a scale. With 2 bits, it is a sign and one of
    two magnitudes: the means of the numbers below and above the mean magnitude.

    Args:
        bits: Of a number: 8, 4 or 2; 32 stands for numbers that are sent as they are.
    """

    bits: int

    @property
    def is_exact(self) -> bool:
        """Whether numbers arrive as they are, so that nothing is left for the next message."""
        return self.bits == _FP32

    @property
    def share(self) -> float:
        """The bytes of a long message, beside those of its numbers in 32 bits."""
        return self.size(_LONG) / (4 * _LONG)

    def size(self, numel: int) -> int:
        """Return the bytes of a message."""
        if self.is_exact:
            return 4 * numel
        return -(-numel // GROUP) * (4 * num_scales(self.bits) + GROUP * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        """Write numbers.

        Args:
            values: (E,), float32.

        Returns:
            (M,), uint8, of `size`. Numbers that are not finite stay so.
        """
        rows = functional.pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
        scales, codes = to_codes(rows, self.bits)
        return torch.cat([scales.reshape(-1).view(torch.uint8), pack(codes, self.bits)])

    def encode_with(self, values: Tensor, residual: Tensor) -> Tensor:
        """Write numbers and what former messages have left out.

        Args:
            values: (E,), float32.
            residual: (E,), what was left out; then what this message leaves out.
        """
        residual += values
        message = self.encode(residual)
        residual -= self.decode(message, residual.numel())
        return message

    def decode(self, message: Tensor, numel: int) -> Tensor:
        """Return the numbers of an `encode`: (numel,), float32."""
        rows, count = -(-numel // GROUP), num_scales(self.bits)
        scales, codes = message.split([4 * rows * count, rows * GROUP * self.bits // 8])
        scales = scales.clone().view(torch.float32).view(rows, count)  # at an aligned address
        codes = unpack(codes, self.bits).view(rows, GROUP)
        return from_codes(scales, codes, self.bits).view(-1)[:numel]


def num_scales(bits: int) -> int:
    """Return how many scales a row of numbers has."""
    return 2 if bits == _TWO else 1


def to_codes(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scales of rows, (R, 1 or 2) float32, and the codes of their numbers, (R, W)."""
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


def from_codes(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Return the numbers of `to_codes`: (R, W), float32."""
    if bits == _TWO:
        sizes = scales.gather(1, (codes & 1).long())
        return torch.where(codes > 1, -sizes, sizes)
    return codes.to(torch.float32).sub_(2 ** (bits - 1) - 1).mul_(scales)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes as bytes, the first one in the lowest bits."""
    packed, *others = codes.view(-1, 8 // bits).unbind(1)
    for place, part in enumerate(others, 1):
        packed = packed | part << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of a `pack`."""
    shifts = range(0, 8, bits)
    return torch.stack([packed >> shift & 2**bits - 1 for shift in shifts], 1).view(-1)
