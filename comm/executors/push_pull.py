# SPDX-License-Identifier: Apache-2.0
"""Push non-zero blocks to balanced owners, sum them there in rank order, pull the sums.

Balanced parallelism (Zen, OSDI'25) on blocks (OmniReduce, SIGCOMM'21).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from torch import Tensor

from wavemare.comm.blocks.layout import Layout, assign_owners
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, num_chunks, pipelined

__all__ = ["begin_push", "push_and_pull", "push_pull"]


def push_pull(call: CollectiveCall, masks: Masks) -> None:
    """Sum blocks at the owners of `assign_owners`.

    Sends (N-1)/N (d + u) of the bucket in each direction: never more than dense or packed.
    """
    with call.phase("plan"):
        layout = assign_owners(masks)

    def put_back(part: Layout, summed: Tensor) -> None:
        with call.phase("unpack"):
            call.kernels.scatter(summed, call.block, call.index(part.blocks), call.flat)

    push_and_pull(call, layout, put_back)


def push_and_pull(
    call: CollectiveCall,
    layout: Layout,
    use: Callable[[Layout, Tensor], None],
    local: Layout | None = None,
) -> None:
    """Sum blocks at their owners and send the sums to all ranks, chunk by chunk.

    Args:
        call: The call; its bucket is only read, except by ``use``.
        layout: Who owns what; no block twice.
        use: Called for each chunk with its part of the layout and (B * block,) sums in its order,
            when the chunk's blocks in the bucket are no longer read.
        local: The layout with the block numbers of this rank's bucket, if they differ.
    """
    owned = layout.blocks.size / call.size * call.block * call.flat.element_size()
    count = num_chunks(owned)
    local_parts = (local or layout).chunks(count)
    first, second = [], []
    summed = call.packed("summed", layout.blocks.size)
    start = 0
    for number, (part, source) in enumerate(zip(layout.chunks(count), local_parts, strict=True)):
        sums = summed[start : start + part.blocks.size * call.block]
        start += sums.numel()
        group = part.group(call.rank)
        own = sums[group.start * call.block : group.stop * call.block]
        first.append(partial(begin_push, call, source, own, number))
        second.append(partial(_begin_pull, call, part, sums, use))
    pipelined(first, second)


def begin_push(
    call: CollectiveCall, layout: Layout, out: Tensor, number: int = 0
) -> Callable[[], None]:
    """Send non-zero blocks to their owners; the result sums the blocks that this rank owns.

    Args:
        call: The call; its bucket is only read.
        layout: Who owns what.
        out: (m * block,), written: the scaled sums of this rank's m blocks, in layout order.
        number: Of the chunk, whose memory it uses.
    """
    rank, block, kernels = call.rank, call.block, call.kernels
    counts = layout.push_counts()
    arriving = counts[:, rank].tolist()
    received = call.packed(f"received {number}", sum(arriving))
    parts = received.split([count * block for count in arriving])
    sent = call.packed(f"sent {number}", int(counts[rank].sum()) - arriving[rank])
    exchange = call.transport.begin()
    for peer in call.transport.peers():
        exchange.receive(peer, parts[peer])
    start = 0
    for peer in call.transport.peers():
        # Pack for one peer while sending to the previous one.
        with call.phase("pack"):
            index = call.index(layout.pushed(rank, peer))
            part = sent[start : start + index.numel() * block]
            kernels.gather(call.flat, block, index, part)
            start += part.numel()
        with call.phase("push"):
            exchange.send(peer, part)
    with call.phase("pack"):
        kernels.gather(call.flat, block, call.index(layout.pushed(rank, rank)), parts[rank])
    with call.phase("plan"):
        sources = call.index(layout.sources(rank))

    def finish() -> None:
        with call.phase("push"):
            exchange.wait()
        with call.phase("reduce"):
            kernels.reduce(received, sources, block, call.scale, out)

    return finish


def _begin_pull(
    call: CollectiveCall, layout: Layout, summed: Tensor, use: Callable[[Layout, Tensor], None]
) -> Callable[[], None]:
    edges = (layout.edges * np.int64(call.block)).tolist()
    parts = [summed[start:stop] for start, stop in pairwise(edges)]
    with call.phase("pull"):
        exchange = call.transport.begin_all_gather(parts)

    def finish() -> None:
        with call.phase("pull"):
            exchange.wait()
        use(layout, summed)

    return finish
