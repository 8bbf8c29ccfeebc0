# SPDX-License-Identifier: Apache-2.0
"""Sums of some rows of a table, such as an embedding's gradient; a block is a row.

An embedding's gradient has a row for each token, so ids repeat. Each rank first sums its rows of
the same id, in the order of their positions, so all runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.blocks.masks import (
    BlockLayout,
    Masks,
    assign_owners,
    begin_masks,
    bits_of,
    gathered,
)
from wavemare.comm.executors import CollectiveCall, Scratch, gather_and_sum, push_and_pull
from wavemare.comm.kernels.words import compiled, sum_dtype
from wavemare.comm.reduction import Agreement
from wavemare.comm.selection.cost import Constants, predict
from wavemare.comm.statistics import Statistics
from wavemare.comm.transport import Transport
from wavemare.errors import ConfigError

_MODES = ("pushpull", "allgather")
_CHUNK = 1 << 18
"""Elements that are converted at a time: they stay in a core's cache."""
_LARGEST_TABLE = 1 << 24
"""Rows up to which the ranks exchange masks; above, they exchange their ids."""


def check_rows(ids: Tensor, rows: Tensor, num_rows: int | None) -> None:
    """Check the arguments of `SparseComm.allreduce_rows_`; on an accelerator not the ids' values.

    To look at them would stall the caller.

    Raises:
        ConfigError: Shapes or types do not fit, or an id is not a row.
    """
    if num_rows is not None and num_rows < 0:
        raise ConfigError("num_rows", num_rows, "it is negative", "Give 0 or more, or None")
    if ids.device != rows.device:
        reason, remedy = f"the rows are on {rows.device}", "Give ids and rows on one device"
        raise ConfigError("ids", str(ids.device), reason, remedy)
    check_indices("ids", ids, num_rows, f"the table has {num_rows} rows")
    if rows.layout is not torch.strided or not rows.is_contiguous() or rows.dim() != 2:  # noqa: PLR2004
        remedy = "Give contiguous rows, (k, dim)"
        reason = "they are no matrix whose rows stand one after the other"
        raise ConfigError("rows", tuple(rows.shape), reason, remedy)
    if rows.shape[0] != ids.numel() or rows.shape[1] == 0:
        reason = f"there are {ids.numel()} ids, and a row has at least one column"
        raise ConfigError("rows", tuple(rows.shape), reason, "Give (k, dim) for k ids")
    if not rows.dtype.is_floating_point:
        reason = f"they are {rows.dtype}"
        raise ConfigError("rows", tuple(rows.shape), reason, "Give floats of 16 to 64 bits")


def check_indices(key: str, indices: Tensor, end: int | None, reason: str) -> None:
    """Refuse what is no list of numbers from 0, below an end; an accelerator's are not read.

    Args:
        key: Name of the list.
        indices: The list.
        end: None for any numbers.
        reason: Why there is an end.

    Raises:
        ConfigError: Its shape or type does not fit, or a number is out of range.
    """
    if indices.dtype != torch.int64 or indices.dim() != 1:
        shape = tuple(indices.shape)
        raise ConfigError(key, shape, f"it is {indices.dtype} of shape {shape}", "Give (k,), int64")
    if end is not None and indices.numel() and indices.device.type == "cpu":
        least, most = (int(bound) for bound in indices.aminmax())
        if least < 0 or most >= end:
            value = least if least < 0 else most
            raise ConfigError(key, value, reason, "Give numbers from 0, below that number")


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
        transport: Among all ranks.
        scratch: Memory to use.
        constants: Of the cost model.
        mode: ``pushpull`` or ``allgather``; with any other the faster one by that model.
    """

    def __init__(
        self, transport: Transport, scratch: Scratch, constants: Constants, mode: str = "auto"
    ) -> None:
        self._transport = transport
        self._scratch = scratch
        self._constants = constants
        self._modes = (mode,) if mode in _MODES else _MODES
        # Masks on their way; after an error their memory must last.
        self._arriving: Callable[[], Masks] | None = None

    def reduce(
        self,
        ids: Tensor,
        rows: Tensor,
        num_rows: int | None,
        scale: float,
        agreement: Agreement,
        stats: Statistics,
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Sum rows of equal ids, first within a rank and then in the order of the ranks.

        The call agrees with the other ranks; what it returns sums.

        Args:
            ids: (k,), int64.
            rows: (k, dim).
            num_rows: Rows of the table; None if ids can be any number.
            scale: Factor of the sums.
            agreement: Of this call, not begun.
            stats: Filled in.

        Returns:
            What returns ascending ids and their rows, the same on all ranks.
        """
        agreement.begin()
        self._arriving = None
        ahead = self._transport.gathers_side_by_side
        if ahead and num_rows is not None and num_rows <= _LARGEST_TABLE:
            # If the calls agree, all ranks will exchange masks: save the time of a message.
            self._arriving = begin_masks(self._transport, bits_of(ids, num_rows), num_rows)
        agreement.wait()
        return partial(self._sum, ids, rows, num_rows, scale, stats)

    def _sum(
        self, ids: Tensor, rows: Tensor, num_rows: int | None, scale: float, stats: Statistics
    ) -> tuple[Tensor, Tensor]:
        dim = rows.shape[1]
        ids, rows = coalesce(ids, rows)
        call = CollectiveCall(rows.view(-1), dim, scale, self._transport, self._scratch, stats)
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
