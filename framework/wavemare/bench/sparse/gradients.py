# SPDX-License-Identifier: Apache-2.0
"""Gradients of a known sparsity."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wavemare.bench.sparse.request import Case

__all__ = ["active_blocks", "make_gradient"]

_ZIPF_EXPONENT = 1.1


def active_blocks(case: Case, num_blocks: int, rank: int) -> np.ndarray:
    """Return the numbers of the blocks that are not zero on a rank, ascending.

    Args:
        case: Pattern and density.
        num_blocks: Of the bucket.
        rank: Of the process; the same one gets the same blocks in every run.
    """
    count = round(num_blocks * case.density)
    generator = np.random.default_rng(7 if case.pattern == "identical" else 1000 + rank)
    if case.pattern == "zipf":
        likelihood = np.arange(1, num_blocks + 1) ** -_ZIPF_EXPONENT
        likelihood /= likelihood.sum()
        chosen = generator.choice(num_blocks, count, replace=False, p=likelihood)
    else:
        chosen = generator.permutation(num_blocks)[:count]
    return np.sort(chosen)


def make_gradient(case: Case, numel: int, block: int, rank: int) -> Tensor:
    """Return (numel,), float32: normally distributed in its active blocks, else zero.

    Args:
        case: Pattern and density.
        numel: A multiple of the block.
        block: Elements per block.
        rank: Of the process.
    """
    blocks = active_blocks(case, numel // block, rank)
    flat = torch.zeros(numel)
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(len(blocks), block, generator=generator)
    flat.view(-1, block)[torch.from_numpy(blocks)] = values
    return flat
