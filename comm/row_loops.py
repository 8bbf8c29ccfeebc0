# SPDX-License-Identifier: Apache-2.0
"""Loops over ids and rows on a CPU, compiled by numba; they run without the interpreter's lock.

This file can be imported only where numba is installed. `wavemare.comm.hashing` and
`wavemare.comm.coalesce` have slower ways for where it is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wavemare.comm.compiled import compiled

__all__ = ["insert", "place", "sum_rows"]

_u64 = np.uint64


# All operands are unsigned: numba would make a float of a signed and an unsigned one.
@compiled
def _place_of(number: Any, key: Any, count: Any) -> Any:
    h = _u64(number) + key
    h = (h ^ (h >> _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> _u64(27))) * _u64(0x94D049BB133111EB)
    h ^= h >> _u64(31)
    return ((h >> _u64(32)) * count) >> _u64(32)


@compiled
def place(ids: Any, key: Any, count: Any, places: Any) -> None:
    """Hash ids; see `wavemare.comm.hashing.place`.

    Args:
        ids: (n,), int64.
        key: uint64, which hash function.
        count: uint64, number of places, below 2^32.
        places: (n,), integers, written.
    """
    for i in range(ids.size):
        places[i] = _place_of(ids[i], key, count)


@compiled
def insert(ids: Any, keys: Any, cells: Any, first: Any, pending: Any) -> int:
    """Insert ids into a table; see `wavemare.comm.hashing.insert`.

    Args:
        ids: (n,), int64.
        keys: (k,), uint64, the hash functions.
        cells: (c,), signed integers, all -1; written.
        first: (n,), int64, written for all but the ids that are left.
        pending: (n,), int64, written: the positions of the ids that are left.

    Returns:
        Number of ids that are left.
    """
    count = _u64(cells.size)
    left = ids.size
    for i in range(left):
        pending[i] = i
    for key in keys:
        last, left = left, 0
        for j in range(last):
            i = pending[j]
            cell = _place_of(ids[i], key, count)
            owner = cells[cell]
            if owner < 0:
                cells[cell] = owner = i
            if ids[owner] == ids[i]:
                first[i] = owner
            else:
                pending[left] = i
                left += 1
    return left


@compiled
def sum_rows(inverse: Any, rows: Any, sums: Any) -> None:
    """Add each row to a sum, in the order of the rows.

    Args:
        inverse: (n,), int64, for each row the number of its sum.
        rows: (n, d), floats, contiguous.
        sums: (m, d), of the rows' dtype, contiguous; added to.
    """
    for i in range(rows.shape[0]):
        row, total = rows[i], sums[inverse[i]]
        for j in range(row.size):
            total[j] += row[j]
