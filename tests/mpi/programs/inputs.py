# SPDX-License-Identifier: Apache-2.0
"""Buckets of all ranks, made alike on every rank from a seed."""

import zlib

import numpy as np
import torch

SCARCE = 0.01
DENSITIES = {"dense": 1, "half": 0.5, "tenth": 0.1, "hundredth": SCARCE, "zero": 0}


def random_blocks(rng, numel, block, chosen, dtype):
    """Return a bucket with normal numbers of very different sizes in some blocks."""
    blocks = -(-numel // block)
    values = np.zeros((blocks, block))
    if dtype == torch.int32:
        # Sums of several wrap around.
        values[chosen] = rng.integers(-(2**31), 2**31, (len(chosen), block))
        return torch.from_numpy(values.ravel()[:numel].astype(np.int64)).to(torch.int32)
    reach = 2 if dtype == torch.float16 else 8
    powers = 10.0 ** rng.integers(-reach, reach // 2, (len(chosen), 1))
    values[chosen] = rng.standard_normal((len(chosen), block)) * powers
    return torch.from_numpy(values.ravel()[:numel].copy()).to(dtype)


def buckets(name, ranks, numel, block, dtype):
    """Return the buckets of all ranks.

    Args:
        name: One of `DENSITIES`, or what `SPECIAL` has a function for.
        ranks: Number of buckets.
        numel: Elements of each.
        block: Elements per block.
        dtype: Their type.
    """
    seed = zlib.crc32(f"{name} {ranks} {numel} {block}".encode())
    blocks = -(-numel // block)
    result = []
    for rank in range(ranks):
        rng = np.random.default_rng((seed, rank))
        shared = np.random.default_rng(seed)
        density = DENSITIES.get(name, 0.3)
        if name == "densities differ":
            density = rank / max(ranks - 1, 1)
        if name == "one rank empty":
            density = 0.3 * (rank != ranks - 1)
        order = (shared if name in {"same mask", "disjoint"} else rng).permutation(blocks)
        chosen = order[: round(blocks * density)]
        if name == "disjoint":
            chosen = order[rank::ranks]
        if name in {"only the last element", "nothing special"} and numel:
            chosen = order[:0]
        flat = random_blocks(rng, numel, block, chosen, dtype)
        if name in SPECIAL and numel >= 4 * block:
            SPECIAL[name](flat, rank, ranks, block)
        result.append(flat)
    return result


def _last(flat, rank, ranks, block):
    flat[-1] = rank + 1


def _negative_zeros(flat, rank, ranks, block):
    """Blocks of -0.0 on some ranks, where others have zeros or numbers; and single ones."""
    flat[: 3 * block] = 0.0
    if rank % 2 == 0:
        flat[:block] = -0.0
        flat[2 * block : 2 * block + 3] = -0.0
    flat[block : 2 * block] = -0.0
    if rank == ranks - 1:
        flat[2 * block + 5] = 1.0
    flat[-2:] = -0.0


def _not_finite(flat, rank, ranks, block):
    """NaN alone in its block, an infinity, and two that cancel to NaN."""
    flat[: 4 * block] = 0.0
    if rank == 0:
        flat[7] = torch.nan
        flat[block] = torch.inf
    if rank == ranks - 1:
        flat[block + 1] = -torch.inf
        flat[2 * block] = torch.inf
        flat[3 * block - 1] = -torch.inf
    if rank == 0 and ranks > 1:
        flat[2 * block] = -torch.inf


def _cancelling(flat, rank, ranks, block):
    """A block [1, -1, 0, ...], whose sum is zero; and one in which the ranks cancel each other."""
    flat[: 2 * block] = 0.0
    if rank == ranks - 1:
        flat[0], flat[1] = 1.0, -1.0
    if rank < 2 <= ranks:
        flat[block : 2 * block] = 3.0 if rank == 0 else -3.0


def _subnormal(flat, rank, ranks, block):
    """Numbers so small that their mean may round to -0.0, alone in their blocks."""
    flat.zero_()
    least = torch.zeros(2, dtype=flat.dtype)
    raw = least.view(torch.uint8)
    width = flat.element_size()
    raw[0] = 1
    raw[width] = 1
    raw[2 * width - 1] = 0x80
    flat[rank * block // ranks :: block] = least[0]
    flat[3 :: 2 * block] = least[1]


SPECIAL = {
    "only the last element": _last,
    "negative zeros": _negative_zeros,
    "not finite": _not_finite,
    "cancelling": _cancelling,
    "subnormal": _subnormal,
}
ALL = (*DENSITIES, "densities differ", "one rank empty", "same mask", "disjoint", *SPECIAL)
