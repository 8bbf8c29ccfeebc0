# SPDX-License-Identifier: Apache-2.0
"""The four kernels of the sparse collective, on the device where a bucket lives.

A *bucket* is a flat contiguous tensor of E elements, seen as ``ceil(E / block)`` blocks of
``block`` elements, of which the last one may be short (*ragged*). *Packed* blocks stand one after
the other, each of full length; a ragged one is padded with zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["DTYPES", "BlockKernels", "kernels_for", "num_blocks"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float64)
"""What a bucket may hold."""


class BlockKernels(Protocol):
    """What a device must be able to do. All tensors live on it and are contiguous.

    Nothing is allocated for the results: they are written where the caller says.
    """

    def mask(self, flat: Tensor, block: int, bits: Tensor) -> None:
        """Find the blocks that are not zero, and make all zeros of the others positive.

        A block is non-zero if any of its elements has a bit set beside its sign bit (for integers:
        any bit): NaN and infinities are non-zero, -0.0 is zero. A block of zeros in which some are
        -0.0 is rewritten to +0.0 (``sparse.md`` 5.1: replicas would differ in the sign of zero).

        Args:
            flat: (E,), a bucket.
            block: Elements per block.
            bits: (ceil(nb / 8),), uint8, written: bit ``j % 8`` (little-endian) of byte ``j // 8``
                tells of block j; bits behind the last block are 0.
        """

    def gather(self, flat: Tensor, block: int, index: Tensor, packed: Tensor) -> None:
        """Copy blocks out of a bucket.

        Args:
            flat: (E,), a bucket.
            block: Elements per block.
            index: (k,), int64, the numbers of the blocks, each below ``ceil(E / block)``.
            packed: (k * block,), of flat's dtype, written.
        """

    def scatter(self, packed: Tensor, block: int, index: Tensor, flat: Tensor) -> None:
        """Copy packed blocks into a bucket, the reverse of `gather`.

        Args:
            packed: (k * block,).
            block: Elements per block.
            index: (k,), int64, the numbers of the blocks, no two alike.
            flat: (E,), a bucket; its blocks of these numbers are written and no others.
        """

    def reduce(self, packed: Tensor, places: Tensor, block: int, scale: float, out: Tensor) -> None:
        """Sum blocks of several ranks in the order of the ranks.

        For each j: ``out[j] = round(scale * ((+0.0 + packed[places[0, j]]) + packed[places[1, j]]
        + ...))``, where a place of -1 is left out (adding a block of zeros would change nothing).
        16-bit floats are summed and scaled in float32 and rounded once, to nearest even; the
        others in their own type. A scale of 1 is no multiplication.

        Args:
            packed: (r * block,), blocks of all ranks.
            places: (N, m), int64, for each rank the number of its block within ``packed``, or -1.
            block: Elements per block.
            scale: Factor of the sums; must be 1 for integers.
            out: (m * block,), of packed's dtype, written; does not overlap ``packed``.
        """


def num_blocks(numel: int, block: int) -> int:
    """Return the number of blocks of a bucket of so many elements."""
    return -(-numel // block)


@cache
def kernels_for(device_type: str) -> BlockKernels:
    """Return the kernels for a kind of device: compiled by numba for CPUs, by Triton for GPUs."""
    if device_type == "cuda":
        from wavemare.comm.kernels.triton_kernels import TritonKernels

        return TritonKernels()
    from wavemare.comm.kernels.numba_kernels import NumbaKernels

    return NumbaKernels()
