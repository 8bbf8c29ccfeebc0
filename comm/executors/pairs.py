"""Buckets as pairs of an index and a value, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["index_dtype", "nonzero_ids", "sum_dtype"]

_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def index_dtype(numel: int) -> torch.dtype:
    """Return the type of the indices of so many elements."""
    return torch.int32 if numel <= 1 << 31 else torch.int64


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which elements are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def nonzero_ids(flat: Tensor) -> Tensor:
    """Return the elements that have a bit set beside their sign bit; of integers, any bit.

    So NaN is among them and -0.0 is not.

    Args:
        flat: (E,).

    Returns:
        (k,), of `index_dtype`: their indices, ascending.
    """
    words = flat.view(_SIGNED[flat.element_size()])
    if flat.dtype.is_floating_point:
        words = words & torch.iinfo(words.dtype).max
    return words.nonzero().view(-1).to(index_dtype(flat.numel()))
