# SPDX-License-Identifier: Apache-2.0
"""SSAR_Recursive_double of SparCML (SC'19): sparse streams, merged in log2 N rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, Executor
from wavemare.comm.executors.sparse_stream import SparseStream

__all__ = ["SparCML"]


class SparCML(Executor):
    """Between log2 N and N - 1 times d of the bucket, plus indices; it is there to compare with.

    In round i the ranks whose numbers differ in bit i swap what they have, and add it. Ranks
    beyond the largest power of two give theirs to one below first, and get the result last.

    Additions are associated as the ranks' numbers say, the lower ranks' stream is always the left
    operand, and both who swap calculate the same: results are the same on all ranks and in each
    run. But it is a tree, not the sum in the order of the ranks.
    """

    name = "sparcml"
    needs_masks = False
    deterministic = False

    def all_reduce(self, call: CollectiveCall, masks: Masks | None = None) -> None:
        """Fold in, double, fold out."""
        with call.phase("pack"):
            stream = SparseStream.of(call.flat)
        rank, size = call.rank, call.size
        core = 1 << (size.bit_length() - 1)
        if rank >= core:
            _give(call, rank - core, stream)
            stream = _take(call, rank - core, stream)
        else:
            if rank + core < size:
                stream = _sum(call, stream, _take(call, rank + core, stream))
            distance = 1
            while distance < core:
                peer = rank ^ distance
                received = _swap(call, peer, stream)
                left, right = (stream, received) if rank < peer else (received, stream)
                stream = _sum(call, left, right)
                distance *= 2
            if rank + core < size:
                _give(call, rank + core, stream)
        with call.phase("unpack"):
            stream.write(call.flat, call.scale)


def _sum(call: CollectiveCall, left: SparseStream, right: SparseStream) -> SparseStream:
    with call.phase("reduce"):
        return left + right


def _give(call: CollectiveCall, peer: int, stream: SparseStream) -> None:
    with call.phase("push"):
        _exchange(call, peer, [_header(stream)], [])
        _exchange(call, peer, stream.tensors, [])


def _take(call: CollectiveCall, peer: int, like: SparseStream) -> SparseStream:
    with call.phase("push"):
        header = _header(like)
        _exchange(call, peer, [], [header])
        received = SparseStream.empty(like.numel, int(header), like.values.dtype)
        _exchange(call, peer, [], received.tensors)
    return received


def _swap(call: CollectiveCall, peer: int, stream: SparseStream) -> SparseStream:
    with call.phase("push"):
        header = _header(stream)
        _exchange(call, peer, [_header(stream)], [header])
        received = SparseStream.empty(stream.numel, int(header), stream.values.dtype)
        _exchange(call, peer, stream.tensors, received.tensors)
    return received


def _header(stream: SparseStream) -> Tensor:
    return torch.tensor([stream.count])


def _exchange(
    call: CollectiveCall, peer: int, given: Sequence[Tensor], taken: Sequence[Tensor]
) -> None:
    """Send and receive tensors of the host, over whatever memory the network reads."""
    device = call.transport.message_device
    arriving = [tensor.to(device) for tensor in taken]
    exchange = call.transport.begin()
    for tensor in arriving:
        exchange.receive(peer, tensor)
    for tensor in given:
        exchange.send(peer, tensor.to(device))
    exchange.wait()
    for tensor, host in zip(arriving, taken, strict=True):
        if host is not tensor:
            host.copy_(tensor)
