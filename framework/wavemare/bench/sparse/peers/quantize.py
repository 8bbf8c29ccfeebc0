# SPDX-License-Identifier: Apache-2.0
"""Values in 8 or 4 bits with one scale per block, rounded stochastically (QSGD, NeurIPS'17).

A value v of a block whose largest magnitude is m becomes q = v / m * s, rounded down or up such
that its mean is exact: E[decode(encode(v))] = v, and no error exceeds m / s. s is 127 or 7. QSGD's
theory divides by the L2 norm; its experiments, and this, by the largest magnitude.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def levels(bits: int) -> int:
    """Return s, the steps of a scale."""
    return (1 << (bits - 1)) - 1


def encoded(numel: int, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return memory for the codes, uint8, and the scales, float32, of so many values."""
    blocks = -(-numel // block)
    return torch.empty(-(-blocks * block * bits // 8), dtype=torch.uint8), torch.empty(blocks)


def encode(
    values: Tensor, block: int, bits: int, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values (n,), float32; block: values per scale."""
    codes, scales = encoded(len(values), block, bits)
    steps = np.zeros((len(scales), block), np.float32)
    steps.ravel()[: len(values)] = values.numpy()
    np.abs(steps).max(axis=1, out=scales.numpy())
    steps /= np.where(scales > 0, scales, np.float32(1))[:, None]
    steps *= levels(bits)
    steps += random.random(steps.shape, np.float32)
    np.floor(steps, out=steps)
    # A sum beyond the last step is rounded up to the next integer.
    np.minimum(steps, levels(bits), out=steps)
    found = (steps + levels(bits)).astype(np.uint8).ravel()
    if bits == 4:  # noqa: PLR2004
        found = np.append(found, np.zeros(found.size % 2, np.uint8))
        found = found[::2] + 16 * found[1::2]
    codes.copy_(torch.from_numpy(found))
    return codes, scales


def decode(codes: Tensor, scales: Tensor, numel: int, block: int, bits: int) -> Tensor:
    """Return the values (numel,)."""
    if bits == 4:  # noqa: PLR2004
        codes = torch.stack((codes & 15, codes >> 4), dim=1).flatten()[: len(scales) * block]
    steps = codes.view(-1, block).float() - levels(bits)
    return (steps * (scales / levels(bits))[:, None]).flatten()[:numel]
