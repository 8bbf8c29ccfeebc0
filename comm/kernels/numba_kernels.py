# SPDX-License-Identifier: Apache-2.0
"""The kernels of the sparse collective on a CPU, compiled by numba.

All run on one core and without the interpreter's lock, so that a background thread can work for the
main one. Each is compiled when it is first needed for a size of elements, and kept in numba's cache
where a folder for it can be written.

In the loops all numbers are as wide as the elements: numba would calculate in 64 bits, and LLVM
would not use vectors or only short ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.kernels.words import as_words, compiled, compiled_part, magnitude_bits

_PROBE = 16
"""Elements of a block that are looked at first: in a dense bucket there is no need for more."""

_CHUNK = 2048
"""Elements that are summed over all ranks at a time: the sums stay in the first-level cache."""

_f32 = np.float32
_u32 = np.uint32


class NumbaKernels:
    """`BlockKernels` for CPUs; see there."""

    def mask(self, flat: Tensor, block: int, bits: Tensor) -> None:
        """Find the blocks that are not zero; see `BlockKernels.mask`."""
        words = as_words(flat)
        bits.zero_()
        _mask(words, block, words.dtype.type(magnitude_bits(flat.dtype)), bits.numpy())

    def gather(self, flat: Tensor, block: int, index: Tensor, packed: Tensor) -> None:
        """Copy blocks out of a bucket; see `BlockKernels.gather`."""
        _gather(as_words(flat), block, index.numpy(), as_words(packed))

    def scatter(self, packed: Tensor, block: int, index: Tensor, flat: Tensor) -> None:
        """Copy packed blocks into a bucket; see `BlockKernels.scatter`."""
        _scatter(as_words(packed), block, index.numpy(), as_words(flat))

    def reduce(
        self, packed: Tensor, sources: Tensor, block: int, scale: float, out: Tensor
    ) -> None:
        """Sum blocks of several ranks in their order; see `BlockKernels.reduce`."""
        where = sources.numpy()
        if out.dtype in (torch.bfloat16, torch.float16):
            bfloat = out.dtype == torch.bfloat16
            _reduce_half(as_words(packed), where, block, _f32(scale), bfloat, as_words(out))
        else:
            sums = out.numpy()
            _reduce(packed.numpy(), where, block, sums.dtype.type(scale), sums)


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
