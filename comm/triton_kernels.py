# SPDX-License-Identifier: Apache-2.0
"""The kernels on GPUs, in Triton. What they do is said by `BlockKernels`.

Elements are moved and tested as integers, so that NaN, -0.0 and subnormal numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavemare.comm.kernels import DTYPES, BlockKernels, magnitude_bits, num_blocks

_PAIR_BESIDE_SIGN = 0x7FFF7FFF
_NO_SIGN = -1
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
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


class TritonKernels(BlockKernels):
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
    return tensor.view(_WORDS[tensor.itemsize])


def _columns(block: int, limit: int) -> int:
    """Return the width of a tile, a power of two: of the least padding, then the greatest."""
    widths = [min(limit, triton.next_power_of_2(block))]
    while widths[-1] > _NARROWEST:
        widths.append(widths[-1] // 2)
    return min(widths, key=lambda width: num_blocks(block, width) * width)


# --- device code --------------------------------------------------------------------------------
#
# Blocks are the rows of a matrix; a program works on a tile of ROWS rows by COLS columns. Whole
# rows are moved without regard to the end of the bucket, else a bucket whose length is no multiple
# of 16 bytes would be moved element by element; a ragged last block has code of its own. Addresses
# are computed in 64 bits.
#
# Parameters, beside those of `BlockKernels`:
#
# * count: Blocks in a list.
# * whole: Blocks of a bucket that are not ragged.
# * rest: Elements of the ragged one; RAGGED tells whether there is one.
# * size: Bytes of a mask.
# * words: The whole blocks as integers, each of one or two elements.
# * tail: The ragged block as integers of one element.
# * BESIDE_SIGN: The bits of an integer that make it non-zero; -1 if none is a sign of zero.
# * BLOCK: Elements, or integers, per block.
# * PACK: Whether to gather, or to scatter.
# * SUM: The type to sum in.
# * BF16: Whether elements are bfloat16, which come as int16.
# * SCALED: Whether the scale is not 1.

# Lengths differ from step to step. Otherwise each would be compiled anew when it is 1 or a multiple
# of 16, and no access is aligned by them.
_LENGTHS = ("count", "whole", "rest", "size", "ranks")
_jit: Callable[[Callable[..., object]], Any] = partial(triton.jit, do_not_specialize=_LENGTHS)

_INFINITY = tl.constexpr(0x7F800000)


@_jit
def mask_blocks(
    words: tl.tensor,
    bits: tl.tensor,
    size: tl.int64,
    whole: tl.int64,
    tail: tl.tensor,
    rest: tl.int64,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TAIL_COLS: tl.constexpr,
    BESIDE_SIGN: tl.constexpr,
    TAIL_BESIDE_SIGN: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    """Do `BlockKernels.mask`: each program does ROWS blocks, a multiple of 8."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    seen = tl.zeros((ROWS, COLS), words.dtype.element_ty)
    for start in range(0, BLOCK, COLS):
        column = start + tl.arange(0, COLS)
        inside = (row < whole)[:, None] & (column < BLOCK)[None, :]
        seen |= tl.load(words + row[:, None] * BLOCK + column[None, :], mask=inside, other=0)
    word = tl.reduce_or(seen, 1)
    alive = (word & BESIDE_SIGN) != 0
    if BESIDE_SIGN != -1:
        negative_zeros = (word != 0) & (alive == 0)
        for start in range(0, BLOCK, COLS):
            column = start + tl.arange(0, COLS)
            inside = negative_zeros[:, None] & (column < BLOCK)[None, :]
            tl.store(words + row[:, None] * BLOCK + column[None, :], 0, mask=inside)
    if RAGGED:
        if first + ROWS > whole:
            tail_alive = _tail_alive(tail, rest, TAIL_COLS, TAIL_BESIDE_SIGN)
            alive = tl.where(row == whole, tail_alive, alive)
    byte = tl.reshape(alive.to(tl.int32), (ROWS // 8, 8)) << tl.arange(0, 8)[None, :]
    source = first // 8 + tl.arange(0, ROWS // 8)
    tl.store(bits + source, tl.sum(byte, 1).to(tl.uint8), mask=source < size)


@_jit
def _tail_alive(
    tail: tl.tensor, rest: tl.int64, COLS: tl.constexpr, BESIDE_SIGN: tl.constexpr
) -> tl.tensor:
    """Tell whether the ragged block is non-zero; if it is not, make its zeros positive."""
    seen = tl.zeros((COLS,), tail.dtype.element_ty)
    for start in range(0, rest, COLS):
        column = start + tl.arange(0, COLS)
        seen |= tl.load(tail + column, mask=column < rest, other=0)
    alive = (tl.reduce_or(seen, 0) & BESIDE_SIGN) != 0
    if BESIDE_SIGN != -1:
        end = tl.where(alive, 0, rest)
        for start in range(0, end, COLS):
            column = start + tl.arange(0, COLS)
            tl.store(tail + column, 0, mask=column < end)
    return alive


@_jit
def copy_blocks(
    flat: tl.tensor,
    packed: tl.tensor,
    index: tl.tensor,
    count: tl.int64,
    whole: tl.int64,
    rest: tl.int64,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PACK: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    """Do `BlockKernels.gather` or `BlockKernels.scatter`."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    number = tl.load(index + entry, mask=entry < count, other=whole + 1)
    row = flat + number[:, None] * BLOCK + column[None, :]
    packed_row = packed + entry[:, None] * BLOCK + column[None, :]
    inside = (number < whole)[:, None] & (column < BLOCK)[None, :]
    if PACK:
        tl.store(packed_row, tl.load(row, mask=inside), mask=inside)
    else:
        tl.store(row, tl.load(packed_row, mask=inside), mask=inside)
    if RAGGED:
        last = number == whole
        if tl.max(last.to(tl.int32), 0) != 0:
            inside = last[:, None] & (column < rest)[None, :]
            if PACK:
                padded = last[:, None] & (column < BLOCK)[None, :]
                tl.store(packed_row, tl.load(row, mask=inside, other=0), mask=padded)
            else:
                tl.store(row, tl.load(packed_row, mask=inside), mask=inside)


@_jit
def sum_blocks(
    packed: tl.tensor,
    sources: tl.tensor,
    out: tl.tensor,
    ranks: tl.int64,
    count: tl.int64,
    scale: tl.float64,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SUM: tl.constexpr,
    BF16: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Do `BlockKernels.reduce`."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (entry < count)[:, None] & (column < BLOCK)[None, :]
    total = tl.zeros((ROWS, COLS), SUM)
    for rank in tl.range(0, ranks, loop_unroll_factor=4):
        source = tl.load(sources + rank * count + entry, mask=entry < count, other=-1)
        # Adding +0.0 to a sum that began at +0.0 is the same as leaving it out.
        here = inside & (source >= 0)[:, None]
        value = tl.load(packed + source[:, None] * BLOCK + column[None, :], mask=here, other=0)
        total += _float_of_bf16(value) if BF16 else value.to(SUM)
    if SCALED:
        total *= tl.full((1, 1), scale, SUM)
    result = bf16_of_float(total) if BF16 else total.to(out.dtype.element_ty)
    tl.store(out + entry[:, None] * BLOCK + column[None, :], result, mask=inside)


# bfloat16 is converted by hand, as Triton's interpreter cuts off instead of rounding.
@_jit
def _float_of_bf16(word: tl.tensor) -> tl.tensor:
    return (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@_jit
def bf16_of_float(value: tl.tensor) -> tl.tensor:
    """Round float32 to bfloat16 (as int16), to the nearest, ties to even."""
    word = value.to(tl.int32, bitcast=True)
    nearest_even = word + 0x7FFF + ((word >> 16) & 1)
    # A carry out of the fraction of a NaN would make it another number.
    is_nan = (word & 0x7FFFFFFF) > _INFINITY
    return (tl.where(is_nan, word | 0x400000, nearest_even) >> 16).to(tl.int16)
