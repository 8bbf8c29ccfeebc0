# SPDX-License-Identifier: Apache-2.0
"""Loops over pairs on a CPU, compiled by numba; they run without the interpreter's lock."""

from __future__ import annotations

from typing import Any

from wavemare.comm.kernels.words import compiled

__all__ = ["count", "find", "merge"]


@compiled
def count(words: Any, magnitude: Any) -> int:
    """Count the words that have any of some bits set.

    Args:
        words: (n,), unsigned integers.
        magnitude: The bits, of the words' type.
    """
    found = 0
    for i in range(words.size):
        found += (words[i] & magnitude) != 0
    return found


@compiled
def find(words: Any, magnitude: Any, ids: Any) -> None:
    """Find those words.

    Args:
        words: (n,), unsigned integers.
        magnitude: The bits, of the words' type.
        ids: (k + 1,), integers, of which the first k are written: the positions of the words.
    """
    k = 0
    for i in range(words.size):
        # Always written, since a branch would often be guessed wrongly.
        ids[k] = i
        k += (words[i] & magnitude) != 0


@compiled
def merge(ids_a: Any, values_a: Any, ids_b: Any, values_b: Any, ids: Any, values: Any) -> int:
    """Merge two sorted lists of pairs; where both have an id, their values are added, a + b.

    Args:
        ids_a: (m,), integers, ascending, no two alike.
        values_a: (m,).
        ids_b: (n,), as ids_a.
        values_b: (n,), as values_a.
        ids: (m + n,), of the type of ids_a, written.
        values: (m + n,), of the type of values_a, written.

    Returns:
        Number of pairs written.
    """
    i = j = k = 0
    while i < ids_a.size and j < ids_b.size:
        if ids_a[i] < ids_b[j]:
            ids[k], values[k] = ids_a[i], values_a[i]
            i += 1
        elif ids_b[j] < ids_a[i]:
            ids[k], values[k] = ids_b[j], values_b[j]
            j += 1
        else:
            ids[k], values[k] = ids_a[i], values_a[i] + values_b[j]
            i += 1
            j += 1
        k += 1
    while i < ids_a.size:
        ids[k], values[k] = ids_a[i], values_a[i]
        i += 1
        k += 1
    while j < ids_b.size:
        ids[k], values[k] = ids_b[j], values_b[j]
        j += 1
        k += 1
    return k
