# SPDX-License-Identifier: Apache-2.0
"""The kernels on GPUs, in Triton. What they do is said by `BlockKernels`.

Elements are moved and tested as integers, so that NaN, -0.0 and subnormal numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavemare.comm.kernels import DTYPES, num_blocks
from wavemare.comm.kernels.triton_programs import (
    copy_blocks,
    mask_blocks,
    sum_blocks,
)
from wavemare.comm.kernels.words import magnitude_bits, signed_words

_PAIR_BESIDE_SIGN = 0x7FFF7FFF
_NO_SIGN = -1
_SUMS = {torch.int32: tl.int32, torch.float64: tl.float64}
_NARROWEST = 64
"""Columns of a tile, unless a block is smaller: fewer would be less than a cache line."""
_TAIL_COLS = 1024


class Launch(NamedTuple):
    """A program and all that it is started with."""

    program: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Start it on the device of its first argument, in the current stream."""
        with torch.cuda.device_of(self.arguments[0]):
            self.program[self.grid](*self.arguments, **self.options)


class TritonKernels:
    """`BlockKernels` for CUDA devices.

    Args:
        tile: Bytes that a program reads at a time, a power of two from 1024.
        num_warps: Warps of a program.
        start: What is done with each launch.
    """

    def __init__(
        self,
        tile: int = 16384,
        num_warps: int = 4,
        start: Callable[[Launch], None] = Launch.run,
    ) -> None:
        self.tile = tile
        self.num_warps = num_warps
        self.start = start

    def mask(self, flat: Tensor, block: int, bits: Tensor) -> None:
        """See `BlockKernels.mask`."""
        count = num_blocks(flat.numel(), block)
        assert bits.numel() == num_blocks(count, 8)
        whole, rest = divmod(flat.numel(), block)
        words = _words(flat)
        full, tail = words[: whole * block], words[whole * block :]
        tail_beside_sign = beside_sign = (
            magnitude_bits(flat.dtype) if flat.is_floating_point() else _NO_SIGN
        )
        if words.dtype == torch.int16 and block % 2 == 0 and flat.data_ptr() % 4 == 0:
            # Two elements at a time take half the instructions.
            full, block, beside_sign = full.view(torch.int32), block // 2, _PAIR_BESIDE_SIGN
        cols = _columns(block, self.tile // full.itemsize // 8)
        rows = self.tile // full.itemsize // cols
        self._start(
            mask_blocks,
            (num_blocks(count, rows),),
            (full, bits, bits.numel(), whole, tail, rest),
            BLOCK=block,
            ROWS=rows,
            COLS=cols,
            TAIL_COLS=_TAIL_COLS,
            BESIDE_SIGN=beside_sign,
            TAIL_BESIDE_SIGN=tail_beside_sign,
            RAGGED=rest > 0,
        )

    def gather(self, flat: Tensor, block: int, index: Tensor, packed: Tensor) -> None:
        """See `BlockKernels.gather`."""
        self._copy(flat, packed, block, index, pack=True)

    def scatter(self, packed: Tensor, block: int, index: Tensor, flat: Tensor) -> None:
        """See `BlockKernels.scatter`."""
        self._copy(flat, packed, block, index, pack=False)

    def reduce(
        self, packed: Tensor, sources: Tensor, block: int, scale: float, out: Tensor
    ) -> None:
        """See `BlockKernels.reduce`."""
        ranks, count = sources.shape
        assert sources.dtype == torch.int64
        assert sources.is_contiguous()
        assert out.numel() == count * block
        assert scale == 1 or packed.is_floating_point()
        is_bf16 = packed.dtype == torch.bfloat16
        if is_bf16:
            packed, out = _words(packed), _words(out)
        rows, cols = self._tile(packed, block)
        self._start(
            sum_blocks,
            (num_blocks(count, rows), num_blocks(block, cols)),
            (packed, sources, out, ranks, count, float(scale)),
            BLOCK=block,
            ROWS=rows,
            COLS=cols,
            SUM=_SUMS.get(packed.dtype, tl.float32),
            BF16=is_bf16,
            SCALED=scale != 1,
        )

    def _copy(self, flat: Tensor, packed: Tensor, block: int, index: Tensor, pack: bool) -> None:
        assert index.dtype == torch.int64
        assert index.is_contiguous()
        assert packed.numel() == index.numel() * block
        whole, rest = divmod(flat.numel(), block)
        rows, cols = self._tile(flat, block)
        self._start(
            copy_blocks,
            (num_blocks(index.numel(), rows), num_blocks(block, cols)),
            (_words(flat), _words(packed), index, index.numel(), whole, rest),
            BLOCK=block,
            ROWS=rows,
            COLS=cols,
            PACK=pack,
            RAGGED=rest > 0,
        )

    def _tile(self, tensor: Tensor, block: int) -> tuple[int, int]:
        # Half a tile, as much is written as is read.
        elements = self.tile // 2 // tensor.itemsize
        cols = _columns(block, elements)
        return elements // cols, cols

    def _start(
        self, program: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any
    ) -> None:
        if grid[0]:
            options = {"num_warps": self.num_warps, "enable_fp_fusion": False, **constants}
            self.start(Launch(program, grid, arguments, options))


def _words(tensor: Tensor) -> Tensor:
    assert tensor.dtype in DTYPES
    assert tensor.is_contiguous()
    return signed_words(tensor)


def _columns(block: int, limit: int) -> int:
    """Return the width of a tile, a power of two: of the least padding, then the greatest."""
    widths = [min(limit, triton.next_power_of_2(block))]
    while widths[-1] > _NARROWEST:
        widths.append(widths[-1] // 2)
    return min(widths, key=lambda width: num_blocks(block, width) * width)
