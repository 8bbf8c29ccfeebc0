# SPDX-License-Identifier: Apache-2.0
"""Ranges of a bucket that belong to one rank each: summed there, or given to all from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from wavemare.comm.blocks.layout import Piece, owned_ranges
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import Call
from wavemare.comm.executors.pipelining import num_chunks, pipelined
from wavemare.comm.executors.push_pull import push
from wavemare.comm.kernels import num_blocks

__all__ = ["equal_pieces", "gather_ranges", "reduce_and_gather", "reduce_ranges", "reduce_scatter"]


def equal_pieces(numel: int, block: int, num_ranks: int) -> list[Piece]:
    """Cut a bucket into one range of whole blocks for each rank, all of about one size."""
    blocks = num_blocks(numel, block)
    cuts = [min(blocks * owner // num_ranks * block, numel) for owner in range(num_ranks)]
    cuts.append(numel)
    return [Piece(cuts[owner], cuts[owner + 1], owner) for owner in range(num_ranks)]


def reduce_and_gather(call: Call) -> None:
    """Leave the scaled sum of all ranks' buckets in each rank's, summed in the ranks' order."""
    flat, size = call.flat, call.size
    count = num_chunks(flat.nbytes / size)
    # A chunk is a range of the bucket, of which each rank owns a part.
    cuts = [piece.start for piece in equal_pieces(flat.numel(), call.block, count)]
    first, second = [], []
    for number, (start, stop) in enumerate(zip(cuts, [*cuts[1:], flat.numel()], strict=True)):
        pieces = [
            Piece(start + piece.start, start + piece.stop, piece.owner)
            for piece in equal_pieces(stop - start, call.block, size)
        ]
        first.append(partial(_begin_reduce, call, pieces, number))
        second.append(partial(_begin_gather, call, pieces))
    pipelined(first, second)


def reduce_ranges(call: Call, pieces: Sequence[Piece]) -> None:
    """Sum everything at its owner, in the order of the ranks.

    Args:
        call: Its bucket's own ranges hold the scaled sums afterwards; the others stay.
        pieces: Who owns what.
    """
    _begin_reduce(call, pieces, 0)()


def gather_ranges(call: Call, pieces: Sequence[Piece]) -> None:
    """Give all ranks each range as its owner has it.

    Args:
        call: The ranges of other owners are written in its bucket.
        pieces: Who owns what.
    """
    _begin_gather(call, pieces)()


def reduce_scatter(call: Call, masks: Masks, pieces: Sequence[Piece]) -> None:
    """Sum the non-zero blocks at the owners of the ranges in which they lie.

    Args:
        call: Its bucket's own ranges hold the scaled sums afterwards; the others are undefined.
        masks: Of all ranks.
        pieces: Who owns what.
    """
    with call.phase("plan"):
        layout = owned_ranges(masks, call.block, pieces)
    own = layout.group(call.rank)
    summed = call.packed("summed", own.stop - own.start)
    push(call, layout, summed)
    with call.phase("unpack"):
        call.kernels.scatter(summed, call.block, call.index(layout.blocks[own]), call.flat)


def _begin_reduce(call: Call, pieces: Sequence[Piece], number: int) -> Callable[[], None]:
    own = _views(call.flat, pieces, call.rank)
    numel = sum(view.numel() for view in own)
    # The kernels see whole blocks: each rank's contribution is padded to them.
    blocks = num_blocks(numel, call.block)
    received = call.packed(f"received {number}", call.size * blocks).view(call.size, -1)
    with call.phase("push"):
        exchange = call.transport.begin()
        for peer in call.transport.peers():
            for part in _cut_alike(received[peer], own):
                exchange.receive(peer, part)
        for peer in call.transport.peers():
            for view in _views(call.flat, pieces, peer):
                exchange.send(peer, view)
        for part, view in zip(_cut_alike(received[call.rank], own), own, strict=True):
            part.copy_(view)
        received[:, numel:] = 0

    def finish() -> None:
        with call.phase("push"):
            exchange.wait()
        with call.phase("reduce"):
            _sum(call, own, received, blocks, number)

    return finish


def _sum(call: Call, own: Sequence[Tensor], received: Tensor, blocks: int, number: int) -> None:
    places = np.arange(call.size * blocks, dtype=np.int64).reshape(call.size, blocks)
    in_place = len(own) == 1 and own[0].numel() == blocks * call.block
    summed = own[0] if in_place else call.packed(f"summed {number}", blocks)
    call.kernels.reduce(received.view(-1), call.index(places), call.block, call.scale, summed)
    if not in_place:
        for part, view in zip(_cut_alike(summed, own), own, strict=True):
            view.copy_(part)


def _begin_gather(call: Call, pieces: Sequence[Piece]) -> Callable[[], None]:
    with call.phase("pull"):
        exchange = call.transport.begin()
        for peer in call.transport.peers():
            for view in _views(call.flat, pieces, peer):
                exchange.receive(peer, view)
        for peer in call.transport.peers():
            for view in _views(call.flat, pieces, call.rank):
                exchange.send(peer, view)

    def finish() -> None:
        with call.phase("pull"):
            exchange.wait()

    return finish


def _views(flat: Tensor, pieces: Sequence[Piece], owner: int) -> list[Tensor]:
    return [flat[p.start : p.stop] for p in pieces if p.owner == owner and p.stop > p.start]


def _cut_alike(buffer: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    parts, start = [], 0
    for view in views:
        parts.append(buffer[start : start + view.numel()])
        start += view.numel()
    return parts
