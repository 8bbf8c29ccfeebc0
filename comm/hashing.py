# SPDX-License-Identifier: Apache-2.0
"""Hashing of rows whose ids are not bounded: owners, coalescing, and bitmaps of an owner's rows.

This is the hierarchical hashing of Zen (OSDI'25) on a CPU. A first hash function, the same on all
ranks, gives each id its owner. Within one rank, k more functions look for a place in a *parallel
area* of cells, and the few ids that find none go to a *serial area*. With a load of 0.25 (ids per
cell) 11 %, 2.6 %, 0.65 % and 0.14 % are left after 1 to 4 functions; at 0.5 it is 21, 9, 4 and 2 %.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavemare.errors import ConfigError

try:
    from wavemare.comm import row_loops
except ImportError:  # numba is not installed
    row_loops = None  # type: ignore[assignment]

__all__ = ["HashBitmap", "HashedIds", "insert", "owner_of", "place", "unique_by_hash"]

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20
"""Rows that `HashBitmap` hashes at a time."""


class HashedIds(NamedTuple):
    """Ids without duplicates."""

    unique: Tensor
    """(m,), int64, in the order of their first occurrence."""

    inverse: Tensor
    """(n,), int64: ``unique[inverse]`` are the ids."""

    serial: int
    """How many of the m found no cell of the parallel area."""


def owner_of(ids: Tensor, num_owners: int, seed: int = 0) -> Tensor:
    """Return which rank owns each row: the same on all ranks, for the same seed.

    Of n distinct ids, each owner gets ``n / num_owners`` up to a deviation of about the root of it.

    Args:
        ids: (n,), int64 or int32, any numbers; on a CPU.
        num_owners: Number of ranks.
        seed: Other seeds deal otherwise.

    Returns:
        (n,), int64, from 0 to ``num_owners - 1``.

    Raises:
        ConfigError: There is no owner, or the ids are no flat tensor of integers on a CPU.
    """
    if not 1 <= num_owners < 1 << 32:
        raise ConfigError("num_owners", num_owners, "a row has an owner", "Give 1 or more")
    return torch.from_numpy(place(_checked(ids), _key(seed, 0), num_owners))


def unique_by_hash(ids: Tensor, *, probes: int = 3, load: float = 0.25, seed: int = 0) -> HashedIds:
    """Coalesce ids; no id is lost, however many collide.

    Args:
        ids: (n,), int64 or int32, any numbers, duplicates as well; on a CPU.
        probes: Number of hash functions that look for a cell.
        load: Ids per cell of the parallel area, more than 0 and at most 1; a cell takes 4 bytes.
        seed: Of the hash functions; the result does not depend on it, but for ``serial``.

    Raises:
        ConfigError: A number is out of range, or the ids are no flat tensor of integers on a CPU.
    """
    if probes < 1:
        raise ConfigError("probes", probes, "an id needs a hash function", "Give 1 or more")
    if not 0 < load <= 1:
        raise ConfigError("load", load, "it is no share", "Give more than 0 and at most 1")
    numbers = _checked(ids)
    keys = np.array([_key(seed, probe + 1) for probe in range(probes)], dtype=np.uint64)
    # Hashes have 32 bits; a larger table would not be filled evenly.
    count = min(math.ceil(len(numbers) / load), (1 << 32) - 1)
    cells = np.full(count, -1, dtype=np.int32 if len(numbers) < 1 << 31 else np.int64)
    first = np.empty(len(numbers), dtype=np.int64)
    left = insert(numbers, keys, cells, first)
    # The serial area is small: sorting it is fast enough.
    _, index, inverse = np.unique(numbers[left], return_index=True, return_inverse=True)
    first[left] = left[index[inverse]]
    is_first = first == np.arange(len(first))
    inverse = (np.cumsum(is_first) - 1)[first]
    unique = torch.from_numpy(numbers[is_first])
    return HashedIds(unique, torch.from_numpy(inverse), len(index))


class HashBitmap:
    """Says which of an owner's rows are there, with one bit for each row that it owns.

    The rows that an owner may get are known in advance from the hash. So the bitmaps of all owners
    have one bit per row together, where bitmaps over all rows would take that much for each owner,
    and a list of ids is longer as soon as one row in 32 is there.

    It holds 4 bytes for each of the owner's rows (8 if there are 2^31 rows or more).

    Args:
        num_rows: Ids are from 0 to below this.
        num_owners: Number of ranks.
        owner: Rank whose rows these are.
        seed: That of `owner_of`.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, num_rows: int, num_owners: int, owner: int, seed: int = 0) -> None:
        if num_rows < 0:
            raise ConfigError("num_rows", num_rows, "it is negative", "Give 0 or more")
        if not 0 <= owner < num_owners:
            reason = f"there are {num_owners} owners, counted from 0"
            raise ConfigError("owner", owner, reason, "Give one of them")
        dtype = np.int32 if num_rows < 1 << 31 else np.int64
        parts: list[NDArray[Any]] = [np.empty(0, dtype)]
        for start in range(0, num_rows, _CHUNK):
            owners = owner_of(torch.arange(start, min(start + _CHUNK, num_rows)), num_owners, seed)
            parts.append((np.flatnonzero(owners.numpy() == owner) + start).astype(dtype))
        self._rows = np.concatenate(parts)
        self._num_rows = num_rows

    def __len__(self) -> int:
        """Return the number of rows that the owner has."""
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Length of a bitmap."""
        return -(-len(self._rows) // 8)

    def encode(self, ids: Tensor) -> Tensor:
        """Return the bitmap of some of the owner's rows.

        Args:
            ids: (n,), int64 or int32, in any order; on a CPU.

        Returns:
            (num_bytes,), uint8; row j in ascending order is bit ``j % 8`` of byte ``j // 8``.

        Raises:
            ConfigError: One of the ids is none of the owner's.
        """
        numbers = _checked(ids)
        inside = (numbers >= 0) & (numbers < self._num_rows)
        narrow = np.where(inside, numbers, 0).astype(self._rows.dtype)
        index = np.searchsorted(self._rows, narrow)
        known = inside & (index < len(self._rows))
        known[known] = self._rows[index[known]] == narrow[known]
        if not known.all():
            reason = "this row belongs to another owner or does not exist"
            remedy = "Send each row to its owner_of(), with the same seed on all ranks"
            raise ConfigError("ids", int(numbers[~known][0]), reason, remedy)
        flags = np.zeros(len(self._rows), dtype=np.bool_)
        flags[index] = True
        return torch.from_numpy(np.packbits(flags, bitorder="little"))

    def decode(self, bits: Tensor) -> Tensor:
        """Return the ids of a bitmap, (n,), int64, ascending.

        Args:
            bits: (num_bytes,), uint8, from `encode`; on a CPU.

        Raises:
            ConfigError: It is not as long as this owner's bitmaps are.
        """
        if bits.shape != (self.num_bytes,):
            reason = f"a bitmap of this owner's {len(self)} rows has {self.num_bytes} bytes"
            remedy = "Give the same number of rows, owners and seed on all ranks"
            raise ConfigError("bits", tuple(bits.shape), reason, remedy)
        flags = np.unpackbits(bits.numpy(), count=len(self._rows), bitorder="little")
        return torch.from_numpy(self._rows[flags.view(np.bool_)].astype(np.int64))


def place(ids: NDArray[np.int64], key: np.uint64, count: int) -> NDArray[np.int64]:
    """Return one of ``count`` places for each id.

    The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA'14) of ``id + key``; its
    upper 32 bits are scaled to the places, which is faster than a remainder.

    Args:
        ids: (n,).
        key: Which hash function.
        count: Number of places, below 2^32.
    """
    if row_loops is not None:
        places = np.empty(len(ids), dtype=np.int64)
        row_loops.place(ids, key, np.uint64(count), places)
        return places
    return _place_by_numpy(ids, key, count)


def insert(
    ids: NDArray[np.int64], keys: NDArray[np.uint64], cells: NDArray[Any], first: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Insert ids into the cells of a table, in one round for each hash function.

    In a round, each id that is left looks at its cell: if it is free, it takes it; if it or its
    like has it, it is done. Of several that meet in a free cell, the first in order takes it.

    Args:
        ids: (n,).
        keys: (k,), the hash functions.
        cells: (c,), signed integers, all -1; written: the position of the id that took the cell.
        first: (n,), written: the position of the first id that equals it, for all that are done.

    Returns:
        Positions of those that are left, ascending.
    """
    if row_loops is not None:
        pending = np.empty(len(ids), dtype=np.int64)
        left = row_loops.insert(ids, keys, cells, first, pending)
        return pending[:left]
    return _insert_by_numpy(ids, keys, cells, first)


def _place_by_numpy(ids: NDArray[np.int64], key: np.uint64, count: int) -> NDArray[np.int64]:
    h = ids.view(np.uint64) + key
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return (((h >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)).view(np.int64)


def _insert_by_numpy(
    ids: NDArray[np.int64], keys: NDArray[np.uint64], cells: NDArray[Any], first: NDArray[np.int64]
) -> NDArray[np.int64]:
    pending = np.arange(len(ids))
    for key in keys:
        places = _place_by_numpy(ids[pending], key, len(cells))
        free = cells[places] < 0
        # Of several assignments to a cell the last one stays: backwards, that is the first id.
        cells[places[free][::-1]] = pending[free][::-1]
        owners = cells[places].astype(np.int64)
        done = ids[owners] == ids[pending]
        first[pending[done]] = owners[done]
        pending = pending[~done]
    return pending


def _key(seed: int, function: int) -> np.uint64:
    # Multiples of the golden ratio, mixed: keys of nearby seeds and functions have nothing alike.
    h = (seed * 0x9E3779B97F4A7C15 + (function + 1) * 0xD1342543DE82EF95) & _MASK
    h = ((h ^ (h >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    h = ((h ^ (h >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    return np.uint64(h ^ (h >> 32))


def _checked(ids: Tensor) -> NDArray[np.int64]:
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32) or ids.device.type != "cpu":
        value = f"{ids.dtype} {tuple(ids.shape)} on {ids.device}"
        reason = "ids are a flat tensor of int64 or int32 on a CPU"
        raise ConfigError("ids", value, reason, "Convert them")
    return np.ascontiguousarray(ids.to(torch.int64).numpy())
