# SPDX-License-Identifier: Apache-2.0
"""Sums of some rows of a table, such as an embedding's gradient; a block is a row.

An embedding's gradient has a row for each token, so ids repeat. Each rank first sums its rows of
the same id, in the order of their positions, so all runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.cost import Constants, predict
from wavemare.comm.executors import CollectiveCall, gather_and_sum, push_and_pull
from wavemare.comm.kernels import compiled, sum_dtype
from wavemare.comm.masks import (
    BlockLayout,
    Masks,
    assign_owners,
    begin_masks,
    bits_of,
    gathered,
)
from wavemare.comm.reduction import Agreement

_MODES = ("pushpull", "allgather")
_CHUNK = 1 << 18
"""Elements that are converted at a time: they stay in a core's cache."""
_LARGEST_TABLE = 1 << 24
"""Rows up to which the ranks exchange masks; above, they exchange their ids."""


def blocks_of_rows(ids: Tensor, dim: int, block: int, start: int = 0) -> Tensor:
    """Return the blocks in which rows of a table lie.

    Args:
        ids: (k,), int64, row numbers.
        dim: Columns of the table.
        block: Elements per block.
        start: First element of the table in its bucket.

    Returns:
        (k * m,), int64, block numbers; some repeat.
    """
    first = (start + ids * dim) // block
    last = (start + (ids + 1) * dim - 1) // block
    steps = torch.arange((dim + block - 2) // block + 1, device=ids.device)
    return torch.minimum(first[:, None] + steps, last[:, None]).view(-1)


class RowReducer:
    """Sums rows over all ranks.

    Args:
        mode: ``pushpull`` or ``allgather``; with any other the faster one by the cost model.
        constants: Of the cost model.
    """

    def __init__(self, mode: str, constants: Constants) -> None:
        self._constants = constants
        self._modes = (mode,) if mode in _MODES else _MODES
        # Masks on their way; after an error their memory must last.
        self._arriving: Callable[[], Masks] | None = None

    def reduce(
        self, ids: Tensor, num_rows: int | None, call: CollectiveCall, agreement: Agreement
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Sum rows of equal ids, first within a rank and then in the order of the ranks.

        This agrees with the other ranks; what it returns sums.

        Args:
            ids: (k,), int64.
            num_rows: Rows of the table; None if ids can be any number.
            call: Has the rows as its blocks.
            agreement: Of this call, not begun.

        Returns:
            What returns ascending ids and their rows, the same on all ranks.
        """
        agreement.begin()
        self._arriving = None
        ahead = call.transport.gathers_side_by_side
        if ahead and num_rows is not None and num_rows <= _LARGEST_TABLE:
            # If the calls agree, all ranks will exchange masks: save the time of a message.
            self._arriving = begin_masks(call.transport, bits_of(ids, num_rows), num_rows)
        agreement.wait()
        return partial(self._sum, ids, num_rows, call)

    def _sum(
        self, ids: Tensor, num_rows: int | None, call: CollectiveCall
    ) -> tuple[Tensor, Tensor]:
        dim, stats = call.block, call.stats
        ids, rows = coalesce(ids, call.flat.view(-1, dim))
        call = replace(call, flat=rows.view(-1))
        if num_rows is None or num_rows > _LARGEST_TABLE:
            union, masks = self._exchange_ids(call, ids)
            ids = torch.searchsorted(union, ids)  # rows of a table of the union alone
        else:
            union, masks = None, self._masks(call, ids, num_rows)
            stats.density = float(masks.counts.mean()) / max(num_rows, 1)
            stats.union = masks.union_size / max(num_rows, 1)
        seconds = predict(masks, dim * rows.element_size(), self._constants, searched=False)
        chosen = min(self._modes, key=lambda name: seconds[name])
        stats.executor, stats.predicted_s = f"rows-{chosen}", seconds[chosen]
        found, sums = self._by_masks(call, ids, masks, chosen)
        return (found if union is None else union), sums

    def _exchange_ids(self, call: CollectiveCall, ids: Tensor) -> tuple[Tensor, Masks]:
        """Return (U,), the ascending ids of all ranks, and which rank has which."""
        with call.phase("metadata"):
            lengths = torch.empty(call.size, 1, dtype=torch.int64)
            call.transport.all_gather(torch.tensor([ids.numel()]), lengths)
            parts = [ids.new_empty(length) for length in lengths[:, 0].tolist()]
            parts[call.rank] = ids
            call.transport.all_gather_parts(parts)
        with call.phase("plan"):
            union, columns = torch.unique(torch.cat(parts).cpu(), return_inverse=True)
            present = np.zeros((call.size, union.numel()), dtype=bool)
            present[np.repeat(np.arange(call.size), lengths[:, 0]), columns.numpy()] = True
        return union.to(ids.device), Masks.of(present)

    def _masks(self, call: CollectiveCall, ids: Tensor, num_rows: int) -> Masks:
        if self._arriving is None:
            with call.phase("list"):
                bits = bits_of(ids, num_rows)
            self._arriving = begin_masks(call.transport, bits, num_rows)
        with call.phase("metadata"):
            masks, self._arriving = self._arriving(), None
            return masks

    def _by_masks(
        self, call: CollectiveCall, ids: Tensor, masks: Masks, chosen: str
    ) -> tuple[Tensor, Tensor]:
        own = ids.cpu().numpy()
        with call.phase("plan"):
            layout = assign_owners(masks) if chosen == "pushpull" else gathered(masks)
        out = call.flat.new_empty(layout.blocks.size * call.block)
        if chosen == "pushpull":

            def put(part: BlockLayout, summed: Tensor) -> None:
                with call.phase("unpack"):
                    rows = np.searchsorted(masks.union, part.blocks)
                    call.kernels.scatter(summed, call.block, call.index(rows), out)

            push_and_pull(call, layout, put, held=own)
        else:
            gather_and_sum(call, masks, np.arange(own.size), layout, out)
        return call.index(masks.union), out.view(-1, call.block)


@torch.no_grad()
def coalesce(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the rows of each id.

    Each sum is ``((+0.0 + row) + row) + ...`` in the order of the positions, in float32 (float64
    for float64); for 16-bit rows it is rounded once, to nearest even. An id stays even if its rows
    sum to zero.

    Args:
        ids: (n,), int64, any numbers; on the device of the rows.
        rows: (n, d), floats.

    Returns:
        (m,), int64, the distinct ids in ascending order, and (m, d), their sums, of rows' dtype.
    """
    if rows.device.type != "cpu":
        return coalesce_sorted(ids, rows)
    unique, inverse = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(len(unique), rows.shape[1], dtype=sum_dtype(rows.dtype))
    # One part, unless parts must be converted.
    size = len(rows) if rows.dtype == sums.dtype else _CHUNK // max(1, rows.shape[1])
    parts = rows.contiguous().split(max(1, size)), inverse.split(max(1, size))
    for part, positions in zip(*parts, strict=True):
        _add_rows(positions.numpy(), part.to(sums.dtype).numpy(), sums.numpy())
    return unique, sums.to(rows.dtype)


@torch.no_grad()
def coalesce_sorted(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same on an accelerator: the rows are copied in the order of their ids first."""
    ordered, position = ids.sort(stable=True)
    unique, lengths = torch.unique_consecutive(ordered, return_counts=True)
    if unique.numel() == 0 or rows.shape[1] == 0:
        return unique, rows.new_zeros(len(unique), rows.shape[1])
    # Neither scatter_add nor index_add keeps an order on GPUs; this sums each segment in a loop.
    terms = rows.index_select(0, position).to(sum_dtype(rows.dtype))
    sums = torch.segment_reduce(terms, "sum", lengths=lengths, unsafe=True, initial=0.0)
    return unique, sums.to(rows.dtype)


# 1.2x to 2x faster than `index_add_`.
@compiled
def _add_rows(positions: Any, rows: Any, sums: Any) -> None:
    for i in range(rows.shape[0]):
        row, total = rows[i], sums[positions[i]]
        for j in range(row.size):
            total[j] += row[j]
