# SPDX-License-Identifier: Apache-2.0
"""The kernels of the sparse collective on a CPU without a compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.kernels.words import as_words, magnitude_bits, sum_dtype

__all__ = ["NumpyKernels"]

_CHUNK = 1 << 15
"""Elements that are summed over all ranks at a time: the sums stay in the second-level cache."""


class NumpyKernels:
    """`BlockKernels` for CPUs where numba is not installed; see there."""

    def mask(self, flat: Tensor, block: int, bits: Tensor) -> None:
        """Find the blocks that are not zero; see `BlockKernels.mask`."""
        words = as_words(flat)
        whole = words[: words.size - words.size % block].reshape(-1, block)
        union = np.bitwise_or.reduce(_widest(whole), axis=1)
        # The words of a wide one are of different elements, but each has its sign bit in place.
        magnitude = magnitude_bits(flat.dtype) * (
            np.iinfo(union.dtype).max // np.iinfo(words.dtype).max
        )
        found = union & union.dtype.type(magnitude) != 0
        whole[~found & (union != 0)] = 0
        if words.size % block:
            ragged = words[whole.size :]
            some = np.bitwise_or.reduce(ragged) & words.dtype.type(magnitude_bits(flat.dtype)) != 0
            if not some:
                ragged[:] = 0
            found = np.append(found, some)
        bits.numpy()[:] = np.packbits(found, bitorder="little")

    def gather(self, flat: Tensor, block: int, index: Tensor, packed: Tensor) -> None:
        """Copy blocks out of a bucket; see `BlockKernels.gather`."""
        whole, ragged, numbers, at = _split(flat, block, index)
        rows = as_words(packed).reshape(-1, block)
        for part in (slice(at), slice(at + 1, None)):
            # With "clip", numpy does not keep a second copy of the result in case of an error.
            np.take(whole, numbers[part], axis=0, out=rows[part], mode="clip")
        for row in rows[at : at + 1]:
            row[: ragged.size] = ragged
            row[ragged.size :] = 0

    def scatter(self, packed: Tensor, block: int, index: Tensor, flat: Tensor) -> None:
        """Copy packed blocks into a bucket; see `BlockKernels.scatter`."""
        whole, ragged, numbers, at = _split(flat, block, index)
        rows = as_words(packed).reshape(-1, block)
        for part in (slice(at), slice(at + 1, None)):
            whole[numbers[part]] = rows[part]
        for row in rows[at : at + 1]:
            ragged[:] = row[: ragged.size]

    def reduce(self, packed: Tensor, places: Tensor, block: int, scale: float, out: Tensor) -> None:
        """Sum blocks of several ranks in their order; see `BlockKernels.reduce`."""
        blocks = packed.view(-1, block)
        results = out.view(-1, block)
        step = max(1, _CHUNK // block)
        wide = sum_dtype(out.dtype)
        for first in range(0, len(results), step):
            result = results[first : first + step]
            # 16-bit floats are summed elsewhere, the others where the result shall be.
            sums = result.to(wide).numpy()
            sums[:] = 0
            with np.errstate(all="ignore"):
                for where in places[:, first : first + step].numpy():
                    _add(blocks, where, sums)
                if scale != 1:
                    sums *= sums.dtype.type(scale)
            if wide != out.dtype:
                result.copy_(torch.from_numpy(sums))


def _widest(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return rows of words as rows of 8-byte words, if they are whole ones."""
    wide = np.dtype(np.uint64)
    return rows if rows.shape[1] * rows.itemsize % wide.itemsize else rows.view(wide)


def _split(flat: Tensor, block: int, index: Tensor) -> tuple[Any, Any, Any, int]:
    """Return a bucket's whole blocks, the ragged one, the index, and the place of that in it."""
    words = as_words(flat)
    whole = words[: words.size - words.size % block].reshape(-1, block)
    numbers = index.numpy()
    found = np.flatnonzero(numbers == len(whole))
    return whole, words[whole.size :], numbers, int(found[0]) if found.size else numbers.size


def _add(blocks: Tensor, where: np.ndarray[Any, Any], sums: np.ndarray[Any, Any]) -> None:
    """Add one rank's blocks to sums; ``where`` gives their numbers or -1."""
    present = np.flatnonzero(where >= 0)
    if not present.size:
        return
    numbers = where[present]
    in_a_row = numbers[-1] - numbers[0] == numbers.size - 1 and bool((np.diff(numbers) == 1).all())
    terms = blocks[numbers[0] : numbers[-1] + 1] if in_a_row else blocks[torch.from_numpy(numbers)]
    values = terms.to(sum_dtype(terms.dtype)).numpy()
    if present.size == len(sums):
        sums += values
    else:
        sums[present] += values
