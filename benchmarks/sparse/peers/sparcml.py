# SPDX-License-Identifier: Apache-2.0
"""SparCML (SC'19), element by element.

SSAR_Recursive_double merges sparse streams in log2 N rounds. SSAR_Split_allgather adds them at the
owners of equal ranges and gathers the sums as pairs; DSAR_Split_allgather gathers them densely, and
may quantize them by QSGD for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.sparse.peers.base import (
    Peer,
    borders,
    decode,
    elements,
    encode,
    encoded,
    push_to_ranges,
    sum_at_ranges,
)
from benchmarks.sparse.request import SparseRequest
from wavemare.comm.kernels import compiled
from wavemare.comm.transport import Transport

_QSGD_BLOCK = 512


def split_allgather(table: Tensor, blocks: Tensor, transport: Transport) -> None:
    """Sum a bucket by SSAR_Split_allgather: sends (N-1)/N (d + u) of it, and as many indices."""
    ids, values = sum_at_ranges(transport, elements(table, blocks), table.numel())
    table.view(-1)[ids] = values


def dsar(table: Tensor, blocks: Tensor, transport: Transport) -> None:
    """Sum a bucket by DSAR_Split_allgather: sends (N-1)/N (2 d + 1) of it."""
    transport.all_gather_parts(_sum_ranges(table, blocks, transport))


def _sum_ranges(table: Tensor, blocks: Tensor, transport: Transport) -> list[Tensor]:
    """Sum this rank's range of a bucket from all ranks' pairs; return the ranges of all ranks."""
    edges = borders(table.numel(), transport.size)
    ranges = list(table.view(-1).split(np.diff(edges).tolist()))
    own = ranges[transport.rank]
    received = push_to_ranges(transport, elements(table, blocks), table.numel())
    own.zero_()
    for ids, values in received:
        own.index_add_(0, ids - edges[transport.rank], values)
    return ranges


class Qsgd8(Peer):
    """DSAR_Split_allgather whose sums travel in QSGD's form: 8 bits, a scale for 512 elements.

    QSGD is unbiased, so there is no residual.
    """

    bits: ClassVar[int] = 8

    def __init__(self, name: str, transport: Transport, request: SparseRequest) -> None:
        super().__init__(name, transport, request)
        self._random = np.random.default_rng(transport.rank)
        self._start, self._error = 0, torch.empty(0)

    def sum_blocks(self, table: Tensor, blocks: Tensor) -> None:
        """Sum a bucket; all ranks, the owner of a range too, get the decoded sums."""
        rank = self.transport.rank
        ranges = _sum_ranges(table, blocks, self.transport)
        parts = [encoded(len(part), _QSGD_BLOCK, self.bits) for part in ranges]
        parts[rank] = encode(ranges[rank], _QSGD_BLOCK, self.bits, self._random)
        for tensors in zip(*parts, strict=True):
            self.transport.all_gather_parts(tensors)
        self._start = borders(table.numel(), self.transport.size)[rank]
        self._error = ranges[rank].clone()
        for part, (codes, scales) in zip(ranges, parts, strict=True):
            part.copy_(decode(codes, scales, len(part), _QSGD_BLOCK, self.bits))
        self._error -= ranges[rank]

    def left_out(self) -> Tensor:
        """Return the errors of this rank's range."""
        lacking = torch.zeros_like(self.bucket)
        lacking[self._start : self._start + len(self._error)] = self._error
        return lacking


class Qsgd4(Qsgd8):
    """The same with 4 bits."""

    bits = 4


def recursive_double(table: Tensor, blocks: Tensor, transport: Transport) -> None:
    """Sum a bucket by SSAR_Recursive_double.

    In round i, ranks whose numbers differ in bit i swap their streams, and add them. Ranks beyond
    the largest power of two first give theirs to one below, and get the result last. The lower
    rank's stream is always the left operand, so all ranks have the same bits.
    """
    stream = SparseStream.of(table.numel(), *elements(table, blocks))
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
    stream.write(table.view(-1))


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
    def of(cls, numel: int, ids: Tensor, values: Tensor) -> SparseStream:
        """Return the stream of some elements of a bucket (n,)."""
        return cls(numel, ids, values)._smaller()

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
        """Write the vector into a bucket (n,) that is zero elsewhere."""
        if self.ids is None:
            flat.copy_(self.values)
        else:
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
