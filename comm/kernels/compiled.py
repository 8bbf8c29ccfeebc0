# SPDX-License-Identifier: Apache-2.0
"""How the loops on a CPU are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is compiled when it is first called, and kept on disk if possible.

    It runs without the interpreter's lock.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # There is no folder that numba could write.
        return numba.njit(nogil=True)(function)
