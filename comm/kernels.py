# SPDX-License-Identifier: Apache-2.0
"""The four kernels of the sparse collective on a CPU; `triton_kernels.py` has those of GPUs.

A *bucket* is a flat contiguous tensor of E elements, seen as ``ceil(E / block)`` blocks of
``block`` elements; the last one may be short (*ragged*). *Packed* blocks are contiguous and of full
length; a ragged one is padded with zeros. Read `BlockKernels` first.

All run on one core and without the interpreter's lock, so that a background thread can work for the
main one. Each is compiled when it is first needed for a size of elements, and kept in numba's cache
where a folder for it can be written.

Kernels see elements as integers of their size (*words*): numpy has no bfloat16, and copies of words
keep NaN as they are. Words are unsigned here, signed in torch and Triton. In the loops all numbers
are as wide as the elements: numba would calculate in 64 bits, and LLVM would not use vectors or
only short ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    import numba
except ModuleNotFoundError:  # an extra: `SparseComm` says so
    numba = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float64)
"""What a bucket may hold."""
_COMPILING = RLock()
"""numba looks up the types of arguments in a table that another thread's first call may change."""
_UNSIGNED = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_PROBE = 16
"""Elements of a block that are looked at first: in a dense bucket there is no need for more."""
_CHUNK = 2048
"""Elements that are summed over all ranks at a time: the sums stay in the first-level cache."""

_f32 = np.float32
_u32 = np.uint32


def num_blocks(numel: int, block: int) -> int:
    """Return the number of blocks of a bucket of ``numel`` elements."""
    return -(-numel // block)


def as_words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory, on a CPU, as unsigned integers of the size of its elements."""
    return tensor.view(_UNSIGNED[tensor.itemsize]).numpy()


def magnitude_bits(dtype: torch.dtype) -> int:
    """Return those bits of an element that tell it from zero: of floats, all but the sign."""
    bits = 8 * dtype.itemsize
    return (1 << (bits - 1 if dtype.is_floating_point else bits)) - 1


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which elements are summed: float32 for 16-bit floats, else their own."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def compiled_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only compiled ones call; see `compiled`."""
    if numba is None:
        return function
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # No writable folder for numba's cache.
        return numba.njit(nogil=True)(function)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function by numba at its first call, without the interpreter's lock.

    Without numba it stays as it is, far too slow to be called.
    """
    kernel = compiled_part(function)
    ready: set[tuple[Any, ...]] = set()

    @wraps(function)
    def call(*arguments: Any) -> Any:
        kinds = tuple(getattr(argument, "dtype", type(argument)) for argument in arguments)
        if kinds in ready:
            return kernel(*arguments)
        with _COMPILING:
            result = kernel(*arguments)
        ready.add(kinds)
        return result

    return call


class BlockKernels:
    """The kernels of a CPU. All tensors are on it and contiguous; callers allocate results."""

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
        words = as_words(flat)
        bits.zero_()
        _mask(words, block, words.dtype.type(magnitude_bits(flat.dtype)), bits.numpy())

    def gather(self, flat: Tensor, block: int, index: Tensor, packed: Tensor) -> None:
        """Copy blocks out of a bucket.

        Args:
            flat: (E,), a bucket.
            block: Elements per block.
            index: (k,), int64, the numbers of the blocks, each below ``ceil(E / block)``.
            packed: (k * block,), of flat's dtype, written.
        """
        _gather(as_words(flat), block, index.numpy(), as_words(packed))

    def scatter(self, packed: Tensor, block: int, index: Tensor, flat: Tensor) -> None:
        """Copy packed blocks into a bucket, the reverse of `gather`.

        Args:
            packed: (k * block,).
            block: Elements per block.
            index: (k,), int64, the numbers of the blocks, no two alike.
            flat: (E,), a bucket; its blocks of these numbers are written and no others.
        """
        _scatter(as_words(packed), block, index.numpy(), as_words(flat))

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
        where = sources.numpy()
        if out.dtype in (torch.bfloat16, torch.float16):
            bfloat = out.dtype == torch.bfloat16
            _reduce_half(as_words(packed), where, block, _f32(scale), bfloat, as_words(out))
        else:
            sums = out.numpy()
            _reduce(packed.numpy(), where, block, sums.dtype.type(scale), sums)


@cache
def kernels_for(device_type: str) -> BlockKernels:
    """Return the kernels of a device type."""
    if device_type == "cuda":
        from wavemare.comm.triton_kernels import TritonKernels

        return TritonKernels()
    return BlockKernels()


@compiled
def _mask(words: Any, block: int, magnitude: Any, bits: Any) -> None:
    word = words.dtype.type
    for j in range(-(-words.size // block)):
        data = words[j * block : min((j + 1) * block, words.size)]
        union = word(0)
        if data.size >= _PROBE:
            for i in range(_PROBE):
                union = word(union | data[i])
        if not union & magnitude:
            # A loop that could stop early would be slower than the memory.
            for i in range(data.size):
                union = word(union | data[i])
        if union & magnitude:
            bits[j >> 3] |= 1 << (j & 7)
        elif union:
            data[:] = 0


@compiled
def _gather(words: Any, block: int, index: Any, packed: Any) -> None:
    for k in range(index.size):
        source = words[index[k] * block : min((index[k] + 1) * block, words.size)]
        target = packed[k * block : (k + 1) * block]
        # Assigning a slice would be several times slower: numba looks for overlaps.
        for i in range(source.size):
            target[i] = source[i]
        for i in range(source.size, block):
            target[i] = 0


@compiled
def _scatter(packed: Any, block: int, index: Any, words: Any) -> None:
    for k in range(index.size):
        target = words[index[k] * block : min((index[k] + 1) * block, words.size)]
        source = packed[k * block : k * block + target.size]
        for i in range(target.size):
            target[i] = source[i]


@compiled
def _reduce(packed: Any, sources: Any, block: int, scale: Any, out: Any) -> None:
    for j in range(sources.shape[1]):
        for first in range(0, block, _CHUNK):
            last = min(first + _CHUNK, block)
            sums = out[j * block + first : j * block + last]
            sums[:] = 0
            for rank in range(sources.shape[0]):
                source = sources[rank, j]
                if source >= 0:
                    terms = packed[source * block + first : source * block + last]
                    for i in range(sums.size):
                        sums[i] += terms[i]
            if scale != 1:
                for i in range(sums.size):
                    sums[i] *= scale


@compiled
def _reduce_half(packed: Any, sources: Any, block: int, scale: Any, bfloat: bool, out: Any) -> None:
    scratch = np.empty(min(block, _CHUNK), np.float32)
    for j in range(sources.shape[1]):
        for first in range(0, block, _CHUNK):
            last = min(first + _CHUNK, block)
            sums = scratch[: last - first]
            sums[:] = 0
            for rank in range(sources.shape[0]):
                source = sources[rank, j]
                if source >= 0:
                    terms = packed[source * block + first : source * block + last]
                    if bfloat:
                        _add_bfloat16(terms, sums)
                    else:
                        _add_float16(terms, sums)
            if scale != 1:
                for i in range(sums.size):
                    sums[i] *= scale
            if bfloat:
                _round_bfloat16(sums, out[j * block + first : j * block + last])
            else:
                _round_float16(sums, out[j * block + first : j * block + last])


@compiled_part
def _add_bfloat16(terms: Any, sums: Any) -> None:
    for i in range(sums.size):
        sums[i] += _u32(_u32(terms[i]) << _u32(16)).view(np.float32)


@compiled_part
def _round_bfloat16(sums: Any, out: Any) -> None:
    bits = sums.view(np.uint32)
    for i in range(sums.size):
        odd = _u32(_u32(bits[i] >> _u32(16)) & _u32(1))
        # The lower half of a NaN is zero, as that of all terms is: nothing is carried to its sign.
        out[i] = np.uint16(_u32(bits[i] + _u32(0x7FFF) + odd) >> _u32(16))


@compiled_part
def _add_float16(terms: Any, sums: Any) -> None:
    for i in range(sums.size):
        sign = _u32(_u32(_u32(terms[i]) & _u32(0x8000)) << _u32(16))
        x = _u32(_u32(_u32(terms[i]) & _u32(0x7FFF)) << _u32(13))
        # A subnormal is a fraction of 2**-14: add it to that and take that away.
        least = _u32(113 << 23).view(np.float32)
        exact = _f32(_u32(x + _u32(113 << 23)).view(np.float32) - least).view(np.uint32)
        # The bias of exponents grows from 15 to 127. Infinities and NaN have the largest exponent.
        exact = _u32(x + _u32(112 << 23)) if x >= _u32(1 << 23) else exact
        exact = _u32(x + _u32(224 << 23)) if x >= _u32(31 << 23) else exact
        sums[i] += _u32(exact | sign).view(np.float32)


@compiled_part
def _round_float16(sums: Any, out: Any) -> None:
    bits = sums.view(np.uint32)
    for i in range(sums.size):
        sign = _u32(_u32(bits[i] >> _u32(16)) & _u32(0x8000))
        x = _u32(bits[i] & _u32(0x7FFF_FFFF))
        # In a sum with 0.5, the last bit is worth as much as the least subnormal number.
        near = _u32(_f32(x.view(np.float32) + _f32(0.5)).view(np.uint32) - _u32(126 << 23))
        odd = _u32(_u32(x >> _u32(13)) & _u32(1))
        normal = _u32(_u32(x - _u32((112 << 23) - 0xFFF) + odd) >> _u32(13))
        near = normal if x >= _u32(113 << 23) else near
        near = _u32(0x7C00) if x >= _u32(143 << 23) else near
        near = _u32(0x7E00) if x > _u32(0x7F80_0000) else near
        out[i] = np.uint16(near | sign)
