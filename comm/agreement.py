# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange before they move data: what each calls, and masks."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.blocks.masks import Masks, mask_bytes
from wavemare.comm.kernels import DTYPES
from wavemare.comm.transport.base import Transport
from wavemare.errors import CommError

__all__ = ["HEADER_BYTES", "agree", "digest_of", "exchange_masks"]

OPERATIONS = ("allreduce_", "reduce_scatter_", "allgather_", "allreduce_rows_", "SparseComm")
_FIELDS = 8
HEADER_BYTES = 8 * _FIELDS


def digest_of(*terms: object) -> int:
    """Return a 32-bit checksum of values."""
    return zlib.crc32(repr(terms).encode())


def agree(
    transport: Transport,
    operation: str,
    *,
    block: int,
    number: int = 0,
    numel: int = 0,
    dtype: torch.dtype = torch.float32,
    took_ns: int = 0,
    num_items: int = 0,
    terms: int = 0,
) -> list[int]:
    """Check that all ranks make the same call.

    Args:
        transport: To the other ranks.
        operation: One of `OPERATIONS`.
        block: Elements per block.
        number: Of the call, counted from 0.
        numel: Elements of the bucket, or columns of the rows.
        dtype: Of its elements.
        took_ns: Nanoseconds of this bucket's previous call; 0 if unknown.
        num_items: Rows of a table; -1 if unknown.
        terms: Digest of everything else that must agree (see `digest_of`).

    Returns:
        Each rank's ``took_ns``.

    Raises:
        CommError: A rank makes another call; the message names the rank.
    """
    kinds = OPERATIONS.index(operation), DTYPES.index(dtype)
    numbers = [number, kinds[0], numel, kinds[1], block, took_ns, num_items, terms]
    mine = torch.tensor(numbers, dtype=torch.int64, device=transport.message_device)
    table = mine.new_empty(transport.size, _FIELDS)
    transport.all_gather(mine, table)
    headers = table.tolist()
    times = [numbers.pop(5) for numbers in headers]
    call = headers[transport.rank]
    for rank, numbers in enumerate(headers):
        if numbers != call:
            own, other = _spell(call), _spell(numbers)
            if other == own:
                other = "it with another key, partition, mode, average, staging or cost model"
            raise CommError(
                "collective",
                own,
                f"rank {rank} calls {other} instead",
                "Let all ranks call the same collectives, on equal buckets, in one order",
            )
    return times


def exchange_masks(transport: Transport, bits: Tensor, num_blocks: int) -> Masks:
    """Exchange the masks of all ranks.

    Args:
        transport: To the other ranks.
        bits: (ceil(nb / 8),), uint8: this rank's mask, on the bucket's device or on the host.
        num_blocks: nb.
    """
    mine = bits.to(transport.message_device)
    table = mine.new_empty(transport.size, mask_bytes(num_blocks))
    transport.all_gather(mine, table)
    return Masks(np.ascontiguousarray(table.cpu().numpy()), num_blocks)


def _spell(numbers: list[int]) -> str:
    number, operation, numel, dtype, block, items, _ = numbers
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    extra = {0: "", -1: ", any rows"}.get(items, f", {items} rows")
    return f"#{number} {OPERATIONS[operation]}({numel} {kind}, block {block}{extra})"
