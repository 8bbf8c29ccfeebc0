# SPDX-License-Identifier: Apache-2.0
"""Sums of whole buckets and of their ranges: by their owners, or by the library's reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.blocks.layout import Index, OwnedRange, assign_ranges
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, num_chunks, pipelined
from wavemare.comm.executors.push_pull import begin_push
from wavemare.comm.kernels import num_blocks


def equal_ranges(numel: int, block: int, num_ranks: int) -> list[OwnedRange]:
    """Return one range of whole blocks for each rank, all of about the same size."""
    cuts = pairwise(_equal_cuts(numel, block, num_ranks).tolist())
    return [OwnedRange(*pair, owner) for owner, pair in enumerate(cuts)]


def _equal_cuts(numel: int, block: int, count: int) -> Index:
    """Return (count + 1,): the borders of ranges of whole blocks."""
    blocks = num_blocks(numel, block)
    return np.minimum(blocks * np.arange(count + 1) // count * block, numel)


Parts = Sequence[Sequence[Tensor]]
"""By rank, the parts of a bucket that it owns; empty ones do not travel."""


def _equal_parts(flat: Tensor, block: int, count: int) -> Parts:
    """Return one part for each rank, as `equal_ranges`."""
    sizes = np.diff(_equal_cuts(flat.numel(), block, count)).tolist()
    return [[part] for part in flat.split(sizes)]


def _parts_of(call: CollectiveCall) -> Parts:
    parts: list[list[Tensor]] = [[] for _ in range(call.size)]
    for owned in call.ranges or ():
        parts[owned.owner].append(call.flat[owned.start : owned.stop])
    return parts


def reduce_and_gather(call: CollectiveCall, masks: Masks | None = None) -> None:
    """Sum in rank order: every rank sums ranges of the bucket, and pulls the other ranks' sums.

    It sends 2 (N-1)/N of the bucket, as few bytes as any dense reduction. The network only moves
    bytes, so any type works.
    """
    chunks = _equal_parts(call.flat, call.block, num_chunks(call.flat.nbytes / call.size))
    # Each rank owns a part of each chunk.
    parts = [_equal_parts(chunk, call.block, call.size) for (chunk,) in chunks]
    pipelined(
        [partial(_begin_reduce, call, part, number) for number, part in enumerate(parts)],
        [partial(_begin_gather, call, part) for part in parts],
    )


def reduce_ranges(call: CollectiveCall, masks: Masks | None = None) -> None:
    """Sum all elements of the ranges at their owners, in rank order; the others are unchanged."""
    _begin_reduce(call, _parts_of(call), 0)()


def gather_ranges(call: CollectiveCall) -> None:
    """Copy each range from its owner to all ranks."""
    _begin_gather(call, _parts_of(call))()


def reduce_scatter(call: CollectiveCall, masks: Masks) -> None:
    """Sum the non-zero blocks at the owners of their ranges; others are undefined afterwards."""
    with call.phase("plan"):
        layout = assign_ranges(masks, call.block, call.ranges or ())
    own = layout.group(call.rank)
    summed = call.packed("summed", own.stop - own.start)
    begin_push(call, layout, summed)()
    with call.phase("unpack"):
        call.kernels.scatter(summed, call.block, call.index(layout.blocks[own]), call.flat)


def _begin_reduce(call: CollectiveCall, parts: Parts, number: int) -> Callable[[], None]:
    own = parts[call.rank]
    numel = sum(view.numel() for view in own)
    # Kernels take whole blocks: pad each rank's contribution.
    blocks = num_blocks(numel, call.block)
    received = call.packed(f"received {number}", call.size * blocks).view(call.size, -1)
    with call.phase("push"):
        exchange = call.transport.begin_messages(
            lambda peer: _cut_alike(received[peer], own),
            lambda peer: parts[peer],
        )
        for part, view in zip(_cut_alike(received[call.rank], own), own, strict=True):
            part.copy_(view)
        received[:, numel:] = 0

    def finish() -> None:
        with call.phase("push"):
            exchange.wait()
        with call.phase("reduce"):
            _sum(call, own, received, blocks, number)

    return finish


def _sum(
    call: CollectiveCall, own: Sequence[Tensor], received: Tensor, blocks: int, number: int
) -> None:
    sources = torch.arange(call.size * blocks, device=call.flat.device).view(call.size, blocks)
    in_place = len(own) == 1 and own[0].numel() == blocks * call.block
    summed = own[0] if in_place else call.packed(f"summed {number}", blocks)
    call.kernels.reduce(received.view(-1), sources, call.block, call.scale, summed)
    if not in_place:
        for part, view in zip(_cut_alike(summed, own), own, strict=True):
            view.copy_(part)


def _begin_gather(call: CollectiveCall, parts: Parts) -> Callable[[], None]:
    with call.phase("pull"):
        exchange = call.transport.begin_messages(
            lambda peer: parts[peer], lambda _: parts[call.rank]
        )

    def finish() -> None:
        with call.phase("pull"):
            exchange.wait()

    return finish


def _cut_alike(buffer: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    sizes = [view.numel() for view in views]
    return list(buffer[: sum(sizes)].split(sizes))


def dense(call: CollectiveCall, masks: Masks | None = None) -> None:
    """Sum by MPI_Allreduce, gloo or NCCL; types that these do not support, in rank order."""
    if not call.transport.reduces(call.flat.dtype):
        reduce_and_gather(call)
        return
    with call.phase("dense"):
        call.transport.all_reduce(call.flat)
        if call.scale != 1:
            call.flat.mul_(call.scale)


def packed(call: CollectiveCall, masks: Masks) -> None:
    """Pack the union of all ranks' blocks, sum it by `dense`, and put it back.

    Best where all ranks have the same blocks, and on networks whose reduction is the fastest.
    """
    with call.phase("pack"):
        index = call.index(masks.union)
        blocks = call.packed("packed", index.numel())
        call.kernels.gather(call.flat, call.block, index, blocks)
    if blocks.numel():
        dense(replace(call, flat=blocks))
    with call.phase("unpack"):
        call.kernels.scatter(blocks, call.block, index, call.flat)
