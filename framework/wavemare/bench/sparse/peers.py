# SPDX-License-Identifier: Apache-2.0
"""Sparse collectives of other systems, element by element, over our transports; float32, on CPUs.

AGsparse gathers all non-zero elements on all ranks, as DeepSpeed and PyTorch do with sparse rows.
SparCML (SC'19) merges sparse streams in log2 N rounds (SSAR_Recursive_double).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavemare.comm.kernels.words import as_words, compiled, magnitude_bits
from wavemare.comm.transport import Transport

__all__ = ["PEERS", "SparseStream", "nonzero_ids"]


def nonzero_ids(flat: Tensor) -> Tensor:
    """Return the ascending indices (k,), int32, of the elements that are neither +0.0 nor -0.0."""
    words = as_words(flat)
    magnitude = words.dtype.type(magnitude_bits(flat.dtype))
    count = _count(words, magnitude)
    ids = torch.empty(count + 1, dtype=torch.int32)
    _find(words, magnitude, ids.numpy())
    return ids[:count]


def sum_by_allgather(flat: Tensor, transport: Transport) -> None:
    """Sum a bucket over all ranks by AGsparse, in rank order: (N-1) d of it, and its indices."""
    own_ids = nonzero_ids(flat)
    own_values = flat[own_ids]
    table = torch.empty(transport.size, 1, dtype=torch.int64)
    transport.all_gather(torch.tensor([own_ids.numel()]), table)
    counts = [int(count) for count in table.view(-1)]
    ids, values = (_gather(transport, own, counts) for own in (own_ids, own_values))
    flat.zero_()
    for rank in range(transport.size):
        flat.index_add_(0, ids[rank], values[rank])


def _gather(transport: Transport, own: Tensor, counts: list[int]) -> list[Tensor]:
    parts = list(own.new_empty(sum(counts)).split(counts))
    parts[transport.rank].copy_(own)
    transport.all_gather_parts(parts)
    return parts


def sum_by_doubling(flat: Tensor, transport: Transport) -> None:
    """Sum a bucket over all ranks by SparCML.

    In round i, ranks whose numbers differ in bit i swap their streams, and add them. Ranks beyond
    the largest power of two first give theirs to one below, and get the result last. The lower
    rank's stream is always the left operand, so all ranks have the same bits.
    """
    stream = SparseStream.of(flat)
    rank, size = transport.rank, transport.size
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        _swap(transport, rank - core, stream, receive=False)
        stream = _swap(transport, rank - core, stream, send=False)
    else:
        if rank + core < size:
            stream = stream + _swap(transport, rank + core, stream, send=False)
        distance = 1
        while distance < core:
            received = _swap(transport, rank ^ distance, stream)
            stream = stream + received if rank & distance == 0 else received + stream
            distance *= 2
        if rank + core < size:
            _swap(transport, rank + core, stream, receive=False)
    stream.write(flat)


PEERS: dict[str, Callable[[Tensor, Transport], None]] = {
    "agsparse": sum_by_allgather,
    "sparcml": sum_by_doubling,
}
"""By name: sums a bucket in place."""


@dataclass(frozen=True, eq=False)
class SparseStream:
    """A vector: sorted pairs of index and value, or all values if they take fewer bytes.

    Args:
        numel: n, its length.
        ids: (k,), int32, ascending; None if it is dense.
        values: (k,) or, if it is dense, (n,).
    """

    numel: int
    ids: Tensor | None
    values: Tensor

    @classmethod
    def of(cls, flat: Tensor) -> SparseStream:
        """Return the stream of a bucket."""
        ids = nonzero_ids(flat)
        return cls(flat.numel(), ids, flat[ids])._smaller()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of a message."""
        return [self.values] if self.ids is None else [self.ids, self.values]

    def _smaller(self) -> SparseStream:
        if self.ids is None or self.ids.nbytes + self.values.nbytes < 4 * self.numel:
            return self
        values = self.values.new_zeros(self.numel)
        values[self.ids] = self.values
        return SparseStream(self.numel, None, values)

    def __add__(self, other: SparseStream) -> SparseStream:
        """Add element by element."""
        if self.ids is not None and other.ids is not None:
            most = self.ids.numel() + other.ids.numel()
            ids, values = self.ids.new_empty(most), self.values.new_empty(most)
            tensors = (self.ids, self.values, other.ids, other.values, ids, values)
            count = _merge(*(tensor.numpy() for tensor in tensors))
            return SparseStream(self.numel, ids[:count], values[:count])._smaller()
        if self.ids is not None:
            values = other.values.clone()
            values[self.ids] = self.values + values[self.ids]
        elif other.ids is not None:
            values = self.values.clone()
            values[other.ids] += other.values
        else:
            values = self.values + other.values
        return SparseStream(self.numel, None, values)

    def write(self, flat: Tensor) -> None:
        """Write the vector into a bucket (n,)."""
        if self.ids is None:
            flat.copy_(self.values)
        else:
            flat.zero_()
            flat[self.ids] = self.values


def _swap(
    transport: Transport,
    peer: int,
    stream: SparseStream,
    *,
    send: bool = True,
    receive: bool = True,
) -> SparseStream:
    """Send a stream and receive another one."""
    header = torch.tensor([-1 if stream.ids is None else stream.ids.numel()])
    found = torch.empty(1, dtype=torch.int64)
    _exchange(transport, peer, [header] if send else [], [found] if receive else [])
    if receive:
        count = int(found)
        ids = None if count < 0 else torch.empty(count, dtype=torch.int32)
        values = torch.empty(stream.numel if count < 0 else count)
        received = SparseStream(stream.numel, ids, values)
    else:
        received = stream
    taken = received.tensors if receive else []
    _exchange(transport, peer, stream.tensors if send else [], taken)
    return received


def _exchange(
    transport: Transport, peer: int, given: Sequence[Tensor], taken: Sequence[Tensor]
) -> None:
    exchange = transport.begin()
    for tensor in taken:
        exchange.receive(peer, tensor)
    for tensor in given:
        exchange.send(peer, tensor)
    exchange.wait()


@compiled
def _count(words: Any, magnitude: Any) -> int:
    found = 0
    for i in range(words.size):
        found += (words[i] & magnitude) != 0
    return found


@compiled
def _find(words: Any, magnitude: Any, ids: Any) -> None:
    k = 0
    for i in range(words.size):
        # Always written: a branch would often be guessed wrongly.
        ids[k] = i
        k += (words[i] & magnitude) != 0


@compiled
def _merge(ids_a: Any, values_a: Any, ids_b: Any, values_b: Any, ids: Any, values: Any) -> int:
    """Merge two sorted lists of pairs; values with the same id are added, a + b."""
    i = j = k = 0
    while i < ids_a.size and j < ids_b.size:
        if ids_a[i] < ids_b[j]:
            ids[k], values[k] = ids_a[i], values_a[i]
            i += 1
        elif ids_b[j] < ids_a[i]:
            ids[k], values[k] = ids_b[j], values_b[j]
            j += 1
        else:
            ids[k], values[k] = ids_a[i], values_a[i] + values_b[j]
            i += 1
            j += 1
        k += 1
    while i < ids_a.size:
        ids[k], values[k] = ids_a[i], values_a[i]
        i += 1
        k += 1
    while j < ids_b.size:
        ids[k], values[k] = ids_b[j], values_b[j]
        j += 1
        k += 1
    return k
