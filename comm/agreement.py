# SPDX-License-Identifier: Apache-2.0
"""Messages that ranks exchange before data: the call of each rank, and masks."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavemare.comm.blocks.masks import Masks, mask_bytes
from wavemare.comm.kernels import DTYPES
from wavemare.comm.transport.base import Transport
from wavemare.errors import CommError

OPERATIONS = ("allreduce_", "reduce_scatter_", "allgather_", "allreduce_rows_", "SparseComm")
_FIELDS = 11
HEADER_BYTES = 8 * _FIELDS


def digest_of(*terms: object) -> int:
    """Return a 32-bit checksum of values."""
    return zlib.crc32(repr(terms).encode())


class Reported(NamedTuple):
    """What a rank reports about a call; it may differ from rank to rank.

    Args:
        took_ns: Nanoseconds of this bucket's previous call; 0 if unknown.
        dense_blocks: Non-zero blocks of the bucket, by a sample, if so many that the rank would
            rather send all; else -1.
        stray: A non-zero block that the caller has not listed; -1 if none was found.
        searched: 1 if the caller has given no list, so that the rank reads the whole bucket.
    """

    took_ns: int = 0
    dense_blocks: int = -1
    stray: int = -1
    searched: int = 1


class Reports(NamedTuple):
    """What all ranks report, as `Reported`: one number of each rank, (N,), int64."""

    took_ns: NDArray[np.int64]
    dense_blocks: NDArray[np.int64]
    stray: NDArray[np.int64]
    searched: NDArray[np.int64]


class Agreement:
    """One small message from each rank to all others: that all ranks make the same call.

    Args:
        transport: To the other ranks.
        operation: One of `OPERATIONS`.
        block: Elements per block.
        number: Of the call, counted from 0.
        numel: Elements of the bucket, or columns of the rows.
        dtype: Of its elements.
        num_items: Rows of a table; -1 if unknown.
        terms: Digest of everything else that must agree (see `digest_of`).
    """

    def __init__(
        self,
        transport: Transport,
        operation: str,
        *,
        block: int,
        number: int = 0,
        numel: int = 0,
        dtype: torch.dtype = torch.float32,
        num_items: int = 0,
        terms: int = 0,
    ) -> None:
        self._call = [
            number,
            OPERATIONS.index(operation),
            numel,
            DTYPES.index(dtype),
            block,
            num_items,
            terms,
        ]
        self._transport = transport

    def begin(self, reported: Reported = Reported()) -> None:  # noqa: B008
        """Send this rank's message."""
        mine = torch.tensor([*self._call, *reported], dtype=torch.int64)
        self._table = mine.new_empty(self._transport.size, _FIELDS)
        self._gathering = self._transport.begin_gather(mine, self._table)

    def wait(self) -> Reports:
        """Wait for the messages of all ranks.

        Returns:
            What each rank reports.

        Raises:
            CommError: A rank makes another call; the message names the rank.
        """
        self._gathering.wait()
        table, same = self._table.numpy(), len(self._call)
        differs = (table[:, :same] != self._call).any(axis=1)
        if differs.any():
            rank = int(differs.argmax())
            own, other = _spell(self._call), _spell(table[rank, :same].tolist())
            if other == own:
                other = "it with another key, partition, mode, average, staging or cost model"
            raise CommError(
                "collective",
                own,
                f"rank {rank} calls {other} instead",
                "Let all ranks call the same collectives, on equal buckets, in the same order",
            )
        return Reports(*table[:, same:].T)

    def agree(self) -> None:
        """Send the message and wait for the others'."""
        self.begin()
        self.wait()


def exchange_masks(transport: Transport, bits: Tensor, num_blocks: int) -> Masks:
    """Exchange the masks of all ranks.

    Args:
        transport: To the other ranks.
        bits: (ceil(nb / 8),), uint8: this rank's mask, on the bucket's device or on the host.
        num_blocks: nb.
    """
    table = torch.empty(transport.size, mask_bytes(num_blocks), dtype=torch.uint8)
    transport.all_gather(bits, table)
    return Masks(table.numpy(), num_blocks)


def _spell(numbers: list[int]) -> str:
    number, operation, numel, dtype, block, items, _ = numbers
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    extra = {0: "", -1: ", any rows"}.get(items, f", {items} rows")
    return f"#{number} {OPERATIONS[operation]}({numel} {kind}, block {block}{extra})"
