# SPDX-License-Identifier: Apache-2.0
"""What all systems share, and what those of papers share: over our transports, float32, CPUs.

Most send sparse tensors as pairs of indices and values: indices are (k,), int32 of elements or
int64 of rows; values (k,) or (k, width), float32. Some send values in 8 or 4 bits with one scale
per block, rounded stochastically (QSGD, NeurIPS'17): a value v of a block whose largest magnitude
is m becomes q = v / m * s, rounded down or up such that its mean is exact. So
E[decode(encode(v))] = v, and no error exceeds m / s; s is 127 or 7. QSGD's theory divides by the L2
norm; its experiments, and this, by the largest magnitude.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.sparse.request import Case, SparseRequest
from wavemare.comm.collective_queue import Statistics
from wavemare.comm.transport import Transport


class Bench(ABC):
    """One system on one rank."""

    statistics: Statistics | None = None
    case: Case | None = None

    def prepare(self, case: Case, gradient: Tensor) -> None:
        """Take a gradient, in the form that a model would give to the collective."""
        self.case = case
        self.bucket = gradient

    def reset(self) -> None:
        """Drop what an earlier case has left."""
        return None

    @abstractmethod
    def sum(self) -> Any:
        """Sum over all ranks; this is timed."""

    def result(self, summed: Any) -> Tensor:
        """Return the sum as a flat dense tensor, to be checked."""
        return self.bucket

    def left_out(self) -> Tensor | None:
        """Return what a case's sums lack so far because of this rank; None if they are exact."""
        return None

    def close(self) -> None:
        """Close the collective."""
        return None


def nonzero_rows(table: Tensor) -> Tensor:
    """Return the numbers of a table's rows that are not zero: a model knows them."""
    return table.abs().amax(dim=1).nonzero().flatten()


class AnySource(Transport):
    """A network that can receive from whichever rank comes first, as aggregators do."""

    @abstractmethod
    def receive_any(self, tensor: Tensor) -> int:
        """Receive the next message of any peer; it may be shorter than the tensor.

        No other receive may be pending. Its bytes are not counted.

        Returns:
            The peer.
        """


Summation = Callable[[Tensor, Tensor, Transport], None]
"""Sums a bucket in place: its blocks (nb, block), the numbers of the non-zero ones, transport."""


class Peer(Bench):
    """A system of a paper, over our transports; all ranks build it together.

    Args:
        name: One of `PEERS`.
        transport: Among all ranks; the peer closes it.
        request: Has the elements per block, which divide a bucket.
    """

    def __init__(self, name: str, transport: Transport, request: SparseRequest) -> None:
        self.name = name
        self.transport = transport
        self.block = request.block

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self.transport.bytes_up, self.transport.bytes_down

    def prepare(self, case: Case, gradient: Tensor) -> None:
        """Take a gradient; the numbers of its blocks that are not zero are known."""
        super().prepare(case, gradient)
        self._table = gradient.view(-1, self.block)
        self._blocks = nonzero_rows(self._table)

    def sum(self) -> Any:
        """Sum over all ranks, and count the bytes."""
        up, down = self.traffic
        self.sum_blocks(self._table, self._blocks)
        after = self.traffic
        self.statistics = Statistics(self.name, bytes_up=after[0] - up, bytes_down=after[1] - down)

    @abstractmethod
    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Replace a bucket by the sum over all ranks.

        Args:
            table: (nb, block), its blocks.
            blocks: (k,), int64, ascending: the blocks that are not zero on this rank.
        """

    def close(self) -> None:
        """Close the transport, and what else was opened."""
        self.transport.close()


def plain(function: Summation) -> type[Peer]:
    """Return the class of a system that is exact and keeps no state."""

    class Plain(Peer):
        def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
            function(table, blocks, self.transport)

    return Plain


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


def levels(bits: int) -> int:
    """Return s, the steps of a scale."""
    return (1 << (bits - 1)) - 1


def encoded(numel: int, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return memory for the codes, uint8, and the scales, float32, of so many values."""
    blocks = -(-numel // block)
    return torch.empty(-(-blocks * block * bits // 8), dtype=torch.uint8), torch.empty(blocks)


def encode(
    values: Tensor, block: int, bits: int, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values (n,), float32; block: values per scale."""
    codes, scales = encoded(len(values), block, bits)
    steps = np.zeros((len(scales), block), np.float32)
    steps.ravel()[: len(values)] = values.numpy()
    np.abs(steps).max(axis=1, out=scales.numpy())
    steps /= np.where(scales > 0, scales, np.float32(1))[:, None]
    steps *= levels(bits)
    steps += random.random(steps.shape, np.float32)
    np.floor(steps, out=steps)
    # A sum beyond the last step is rounded up to the next integer.
    np.minimum(steps, levels(bits), out=steps)
    found = (steps + levels(bits)).astype(np.uint8).ravel()
    if bits == 4:  # noqa: PLR2004
        found = np.append(found, np.zeros(found.size % 2, np.uint8))
        found = found[::2] + 16 * found[1::2]
    codes.copy_(torch.from_numpy(found))
    return codes, scales


def decode(codes: Tensor, scales: Tensor, numel: int, block: int, bits: int) -> Tensor:
    """Return the values (numel,)."""
    if bits == 4:  # noqa: PLR2004
        codes = torch.stack((codes & 15, codes >> 4), dim=1).flatten()[: len(scales) * block]
    steps = codes.view(-1, block).float() - levels(bits)
    return (steps * (scales / levels(bits))[:, None]).flatten()[:numel]
