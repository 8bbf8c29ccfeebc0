# SPDX-License-Identifier: Apache-2.0
"""How kernels see the elements of a bucket: as integers, and in the type in which they are summed.

Where only the bits of elements count, buckets are seen as *words*: integers of the elements' size.
numpy has no bfloat16, and a copy of words keeps NaN as they are. On CPUs they are unsigned; torch
and Triton calculate with signed ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_words", "magnitude_bits", "signed_words", "sum_dtype"]

_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def as_words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory, on a CPU, as unsigned integers of the size of its elements."""
    return tensor.view(_UNSIGNED[tensor.itemsize]).numpy()


def signed_words(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as signed integers of the size of its elements."""
    return tensor.view(_SIGNED[tensor.itemsize])


def magnitude_bits(dtype: torch.dtype) -> int:
    """Return those bits of an element that tell it from zero: of floats, all but the sign."""
    bits = 8 * dtype.itemsize
    return (1 << (bits - 1 if dtype.is_floating_point else bits)) - 1


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which elements are summed: float32 for 16-bit floats, else their own."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
