# SPDX-License-Identifier: Apache-2.0
"""Rows of unbounded ids: each goes to the owner that a hash gives it (Zen, OSDI'25)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.executors.base import Call
from wavemare.comm.hashing import HashBitmap, owner_of, unique_by_hash

__all__ = ["HashedRows"]

_ID_BYTES = 8


class HashedRows:
    """Push rows to the owners of their ids, sum them there, pull the sums.

    No mask is exchanged, so that the number of possible ids does not matter. Where it is known and
    the rows are many, owners tell which rows they send by a bitmap over their own ids instead of a
    list; all ranks then hold 4 bytes per possible id.
    """

    def __init__(self) -> None:
        self._bitmaps: tuple[int, int, list[HashBitmap]] | None = None

    def reduce(self, call: Call, ids: Tensor, num_rows: int | None) -> tuple[Tensor, Tensor]:
        """Sum rows over all ranks in the order of the ranks.

        Args:
            call: Its bucket holds the rows one after the other; its block is their width.
            ids: (k,), int64, ascending, no two alike; on a CPU.
            num_rows: Ids are below this; None if they can be any number.

        Returns:
            Ascending ids, on a CPU, and their rows, the same on all ranks.
        """
        with call.phase("plan"):
            owners = owner_of(ids, call.size)
            order = torch.argsort(owners, stable=True)
            counts = torch.bincount(owners, minlength=call.size)
        with call.phase("metadata"):
            table = _gather_numbers(call, counts)
        arriving = table[:, call.rank].tolist()
        sent_ids = ids[order]
        with call.phase("pack"):
            sent = call.packed("sent", ids.numel())
            call.kernels.gather(call.flat, call.block, order.to(call.flat.device), sent)
        got_ids = [torch.empty(count, dtype=torch.int64) for count in arriving]
        received = call.packed("received", sum(arriving))
        got = list(received.split([count * call.block for count in arriving]))
        with call.phase("push"):
            _push(call, sent_ids, sent, counts.tolist(), got_ids, got)
        with call.phase("reduce"):
            owned, summed = _sum(call, got_ids, received)
        return self._pull(call, owned, summed, num_rows)

    def _pull(
        self, call: Call, owned: Tensor, summed: Tensor, num_rows: int | None
    ) -> tuple[Tensor, Tensor]:
        with call.phase("metadata"):
            table = _gather_numbers(call, torch.tensor([owned.numel()]))
        counts = table[:, 0].tolist()
        with call.phase("pull"):
            ids = self._gather_ids(call, owned, counts, num_rows)
            rows = call.packed("pulled", sum(counts))
            parts = list(rows.split([count * call.block for count in counts]))
            parts[call.rank].copy_(summed)
            call.transport.all_gather_parts(parts)
        with call.phase("unpack"):
            ascending = torch.argsort(ids)
            out = call.flat.new_empty(rows.numel())
            call.kernels.gather(rows, call.block, ascending.to(out.device), out)
        return ids[ascending], out.view(-1, call.block)

    def _gather_ids(
        self, call: Call, owned: Tensor, counts: Sequence[int], num_rows: int | None
    ) -> Tensor:
        device = call.transport.message_device
        if num_rows is None or num_rows >= 8 * _ID_BYTES * sum(counts):
            lists = [torch.empty(count, dtype=torch.int64, device=device) for count in counts]
            lists[call.rank].copy_(owned)
            call.transport.all_gather_parts(lists)
            return torch.cat(lists).cpu()
        bitmaps = self._bitmaps_of(num_rows, call.size)
        parts = [torch.empty(b.num_bytes, dtype=torch.uint8, device=device) for b in bitmaps]
        parts[call.rank].copy_(bitmaps[call.rank].encode(owned))
        call.transport.all_gather_parts(parts)
        return torch.cat([b.decode(p.cpu()) for b, p in zip(bitmaps, parts, strict=True)])

    def _bitmaps_of(self, num_rows: int, size: int) -> list[HashBitmap]:
        if self._bitmaps is None or self._bitmaps[:2] != (num_rows, size):
            bitmaps = [HashBitmap(num_rows, size, owner) for owner in range(size)]
            self._bitmaps = num_rows, size, bitmaps
        return self._bitmaps[2]


def _gather_numbers(call: Call, mine: Tensor) -> Tensor:
    """Return (N, n): each rank's numbers."""
    mine = mine.to(call.transport.message_device)
    table = mine.new_empty(call.size, mine.numel())
    call.transport.all_gather(mine, table)
    return table.cpu()


def _push(
    call: Call,
    ids: Tensor,
    rows: Tensor,
    counts: Sequence[int],
    got_ids: Sequence[Tensor],
    got: Sequence[Tensor],
) -> None:
    """Send ids and rows, which are grouped by owner, and receive what this rank owns."""
    device = call.transport.message_device
    id_parts = ids.to(device).split(list(counts))
    row_parts = rows.split([count * call.block for count in counts])
    arriving = [part.to(device) for part in got_ids]
    exchange = call.transport.begin()
    for peer in call.transport.peers():
        exchange.receive(peer, arriving[peer])
        exchange.receive(peer, got[peer])
    for peer in call.transport.peers():
        exchange.send(peer, id_parts[peer])
        exchange.send(peer, row_parts[peer])
    got[call.rank].copy_(row_parts[call.rank])
    arriving[call.rank].copy_(id_parts[call.rank])
    exchange.wait()
    for target, part in zip(got_ids, arriving, strict=True):
        target.copy_(part)


def _sum(call: Call, got_ids: Sequence[Tensor], received: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the rows of equal ids in the order of the ranks.

    Returns:
        Ascending ids of this owner, and their sums.
    """
    all_ids = torch.cat(list(got_ids))
    unique, inverse, _ = unique_by_hash(all_ids)
    ascending = torch.argsort(unique)
    number = torch.empty_like(ascending)
    number[ascending] = torch.arange(unique.numel())
    places = np.full((call.size, unique.numel()), -1, dtype=np.int64)
    ranks = np.repeat(np.arange(call.size), [part.numel() for part in got_ids])
    places[ranks, number[inverse].numpy()] = np.arange(all_ids.numel())
    summed = call.packed("summed", unique.numel())
    call.kernels.reduce(received, call.index(places), call.block, call.scale, summed)
    return unique[ascending], summed
