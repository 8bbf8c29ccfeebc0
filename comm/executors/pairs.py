# SPDX-License-Identifier: Apache-2.0
"""Buckets as pairs of an index and a value, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from wavemare.comm.executors import pair_loops
from wavemare.comm.kernels.words import as_words, magnitude_bits, signed_words

__all__ = ["index_dtype", "nonzero_ids"]


def index_dtype(numel: int) -> torch.dtype:
    """Return the type of the indices of so many elements."""
    return torch.int32 if numel <= 1 << 31 else torch.int64


def nonzero_ids(flat: Tensor) -> Tensor:
    """Return the elements that have a bit set beside their sign bit; of integers, any bit.

    So NaN is among them and -0.0 is not.

    Args:
        flat: (E,).

    Returns:
        (k,), of `index_dtype`: their indices, ascending.
    """
    kind = index_dtype(flat.numel())
    if flat.device.type == "cpu":
        words = as_words(flat)
        magnitude = words.dtype.type(magnitude_bits(flat.dtype))
        number = pair_loops.count(words, magnitude)
        ids = torch.empty(number + 1, dtype=kind)
        pair_loops.find(words, magnitude, ids.numpy())
        return ids[:number]
    signed = signed_words(flat)
    if flat.dtype.is_floating_point:
        signed = signed & magnitude_bits(flat.dtype)
    return signed.nonzero().view(-1).to(kind)
