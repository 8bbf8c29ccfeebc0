# SPDX-License-Identifier: Apache-2.0
"""Elements of buckets as integers (*words*), their sum types, and the compiler of CPU loops.

Words have the size of the elements. numpy has no bfloat16, and copies of words keep NaN as they
are. Words are unsigned on CPUs, signed in torch and Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    import numba
except ModuleNotFoundError:  # an extra: `SparseComm` says so
    numba = None

_COMPILING = RLock()
"""numba looks up the types of arguments in a table that another thread's first call may change."""
_UNSIGNED = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


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
