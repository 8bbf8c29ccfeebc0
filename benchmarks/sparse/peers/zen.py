# SPDX-License-Identifier: Apache-2.0
"""Zen (OSDI'25): balanced parallelism by hashing.

A hash of its number gives each row an owner, so that owners are balanced whatever the masks are,
and no rank needs another's mask. (wavemare sorts blocks by how many ranks have them and deals them
out: exactly balanced, but with an exchange of masks.) Ranks push pairs; owners send a bitmap of
their own rows, which all ranks can number, and the sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.sparse.peers.base import add, push
from wavemare.comm.kernels import compiled
from wavemare.comm.transport import Transport

Index = npt.NDArray[np.int64]

_PROBES = 3
_CELLS_PER_ID = 4
"""A load of 0.25: after 3 probes less than 1 % of the ids are in the serial area."""


def zen(table: Tensor, blocks: Tensor, transport: Transport) -> None:
    """Sum a bucket whose rows are the blocks: sends (N-1)/N (d + u) of it."""
    split = [blocks[places] for places in hash_partition(blocks.numpy(), transport.size)]
    received = push(transport, [(ids, table[ids]) for ids in split])
    owned = _owned(len(table), transport.size)
    own = owned[transport.rank]
    found, sums = add([(torch.searchsorted(own, i), r) for i, r in received], 0, len(own))
    present = np.zeros(len(own), np.bool_)
    present[found.numpy()] = True
    bitmaps = [torch.empty(-(-len(each) // 8), dtype=torch.uint8) for each in owned]
    bitmaps[transport.rank] = torch.from_numpy(np.packbits(present))
    transport.all_gather_parts(bitmaps)
    union = [
        each[torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy(), count=len(each))))]
        for each, bits in zip(owned, bitmaps, strict=True)
    ]
    parts = [sums.new_empty(len(each), table.shape[1]) for each in union]
    parts[transport.rank] = sums
    transport.all_gather_parts(parts)
    for each, part in zip(union, parts, strict=True):
        table[each] = part


@cache
def _owned(rows: int, ranks: int) -> list[Tensor]:
    """Return each rank's own rows, which depend on no gradient."""
    owner = owners(np.arange(rows), ranks)
    return [torch.from_numpy(np.flatnonzero(owner == rank)) for rank in range(ranks)]


def owners(ids: Index, ranks: int) -> Index:
    """Return the owner of each id, the same on all ranks."""
    return (_hash(ids, 0) % np.uint64(ranks)).astype(np.int64)


def hash_partition(ids: Index, ranks: int) -> list[Tensor]:
    """Return for each owner the positions (k,) of its ids, by hierarchical hashing.

    The owner has been chosen by a first hash. Other hashes look for a free cell of its parallel
    area, one after the other. An id that finds none is appended to the serial area, so none is
    lost. Ids can be any numbers, and no two alike.
    """
    cells = max(1, _CELLS_PER_ID * len(ids) // ranks)
    probes = [_hash(ids, 1 + number) % np.uint64(cells) for number in range(_PROBES)]
    parallel = np.full((ranks, cells), -1, np.int64)
    serial = np.empty(len(ids), np.int64)
    owner = owners(ids, ranks)
    serial = serial[: _place(owner, np.stack(probes).astype(np.int64), parallel, serial)]
    return [
        torch.from_numpy(np.concatenate((area[area >= 0], serial[owner[serial] == rank])))
        for rank, area in enumerate(parallel)
    ]


def _hash(ids: Index, seed: int) -> npt.NDArray[np.uint64]:
    """Return the finalizer of MurmurHash3 of ids, by seed."""
    bits = ids.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(33))


@compiled
def _place(owner: Any, probes: Any, parallel: Any, serial: Any) -> int:
    """Place the position of each id; return how many went to the serial area."""
    overflowed = 0
    for i in range(owner.size):
        placed = False
        for probe in range(probes.shape[0]):
            if not placed and parallel[owner[i], probes[probe, i]] < 0:
                parallel[owner[i], probes[probe, i]] = i
                placed = True
        if not placed:
            serial[overflowed] = i
            overflowed += 1
    return overflowed
