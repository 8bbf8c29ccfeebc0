# SPDX-License-Identifier: Apache-2.0
"""The four kernels of the sparse collective, for CPUs and GPUs.

A *bucket* is a flat contiguous tensor of E elements, seen as ``ceil(E / block)`` blocks of
``block`` elements; the last one may be short (*ragged*). *Packed* blocks are contiguous and of full
length; a ragged one is padded with zeros. Read `BlockKernels` below first, then
`numba_kernels.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float64)
"""What a bucket may hold."""


class BlockKernels(Protocol):
    """The kernels of a device. All tensors are on it and contiguous; callers allocate results."""

    def mask(self, flat: Tensor, block: int, bits: Tensor) -> None:
        """Find the non-zero blocks, and rewrite -0.0 in the other blocks to +0.0.

        A block is non-zero if any element has a bit set besides its sign bit (integers: any bit):
        NaN and infinities are non-zero, -0.0 is zero. Replicas would differ in the sign of zero
        if -0.0 stayed.

        Args:
            flat: (E,), a bucket.
            block: Elements per block.
            bits: (ceil(nb / 8),), uint8, written: bit ``j % 8`` (little-endian) of byte ``j // 8``
                is block j; bits after the last block are 0.
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

    def reduce(
        self, packed: Tensor, sources: Tensor, block: int, scale: float, out: Tensor
    ) -> None:
        """Sum blocks of several ranks in the order of the ranks.

        ``out[j] = round(scale * ((+0.0 + packed[sources[0, j]]) + packed[sources[1, j]] + ...))``,
        without the sources that are -1 (adding a block of zeros changes nothing). 16-bit floats
        are summed and scaled in float32 and rounded once, to nearest even; other types are summed
        as they are. A scale of 1 does not multiply.

        Args:
            packed: (r * block,), blocks of all ranks.
            sources: (N, m), int64: for each rank the number of its block in ``packed``, or -1.
            block: Elements per block.
            scale: Factor of the sums; must be 1 for integers.
            out: (m * block,), of packed's dtype, written; does not overlap ``packed``.
        """


def num_blocks(numel: int, block: int) -> int:
    """Return the number of blocks of a bucket of ``numel`` elements."""
    return -(-numel // block)


@cache
def kernels_for(device_type: str) -> BlockKernels:
    """Return the kernels of a device type: numba for CPUs, Triton for GPUs."""
    if device_type == "cuda":
        from wavemare.comm.kernels.triton_kernels import TritonKernels

        return TritonKernels()
    from wavemare.comm.kernels.numba_kernels import NumbaKernels

    return NumbaKernels()
