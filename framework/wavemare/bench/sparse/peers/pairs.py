# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors as pairs of indices and values, and their messages.

Indices are (k,), int32 of elements or int64 of rows; values (k,) or (k, width), float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from wavemare.comm.transport import Transport

Pairs = tuple[Tensor, Tensor]


def elements(table: Tensor, blocks: Tensor) -> Pairs:
    """Return the indices of all elements of some blocks of a bucket (nb, block), and the values."""
    width = table.shape[1]
    ids = blocks.int()[:, None] * width + torch.arange(width, dtype=torch.int32)
    return ids.flatten(), table[blocks].flatten()


def agsparse(table: Tensor, blocks: Tensor, transport: Transport) -> None:
    """Gather the non-zero elements of all ranks, and add them in rank order.

    Sends (N-1) d of the bucket, and as many bytes of indices.
    """
    parts = gather(transport, elements(table, blocks))
    table[blocks] = 0
    for ids, values in parts:
        table.view(-1).index_add_(0, ids, values)


def gather(transport: Transport, pairs: Pairs) -> list[Pairs]:
    """Return the pairs of each rank."""
    table = torch.empty(transport.size, 1, dtype=torch.int64)
    transport.all_gather(torch.tensor([len(pairs[0])]), table)
    gathered = []
    for own in pairs:
        parts = [own.new_empty(count, *own.shape[1:]) for count in table[:, 0].tolist()]
        parts[transport.rank] = own
        transport.all_gather_parts(parts)
        gathered.append(parts)
    return list(zip(*gathered, strict=True))


def push(transport: Transport, parts: Sequence[Pairs]) -> list[Pairs]:
    """Send each rank its part; return the parts for this rank, by sender."""
    rank, size = transport.rank, transport.size
    counts = torch.empty(size, size, dtype=torch.int64)
    transport.all_gather(torch.tensor([len(ids) for ids, _ in parts]), counts)
    received = [
        (ids.new_empty(count), values.new_empty(count, *values.shape[1:]))
        for count, (ids, values) in zip(counts[:, rank].tolist(), parts, strict=True)
    ]
    exchange = transport.begin()
    for peer in transport.peers():
        for tensor in received[peer]:
            exchange.receive(peer, tensor)
    for peer in transport.peers():
        for tensor in parts[peer]:
            exchange.send(peer, tensor)
    exchange.wait()
    received[rank] = parts[rank]
    return received


def borders(numel: int, ranks: int) -> list[int]:
    """Return the N + 1 borders of equal ranges."""
    return [numel * rank // ranks for rank in range(ranks + 1)]


def push_to_ranges(transport: Transport, pairs: Pairs, numel: int) -> list[Pairs]:
    """Send pairs with ascending indices below ``numel`` to the owners of their `borders`."""
    edges = torch.tensor(borders(numel, transport.size), dtype=pairs[0].dtype)
    cuts = torch.searchsorted(pairs[0], edges).tolist()
    parts = [(pairs[0][start:stop], pairs[1][start:stop]) for start, stop in pairwise(cuts)]
    return push(transport, parts)


def add(parts: Sequence[Pairs], start: int, stop: int) -> Pairs:
    """Return the union of pairs with indices from ``start`` to ``stop``, added in their order."""
    like, values = parts[0]
    sums = values.new_zeros(stop - start, *values.shape[1:])
    present = torch.zeros(stop - start, dtype=torch.bool)
    for ids, values in parts:
        sums.index_add_(0, ids - start, values)
        present[ids - start] = True
    found = present.nonzero().flatten()
    return (found + start).to(like.dtype), sums[found]


def sum_at_ranges(transport: Transport, pairs: Pairs, numel: int) -> Pairs:
    """Return the sum of all ranks' pairs: added at the owners of equal ranges, then gathered."""
    edges = borders(numel, transport.size)
    rank = transport.rank
    own = add(push_to_ranges(transport, pairs, numel), edges[rank], edges[rank + 1])
    ids, values = zip(*gather(transport, own), strict=True)
    return torch.cat(ids), torch.cat(values)
