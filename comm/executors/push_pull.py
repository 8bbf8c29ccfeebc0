# SPDX-License-Identifier: Apache-2.0
"""Push non-zero blocks to balanced owners, sum them there in rank order, pull the sums.

Balanced parallelism (Zen, OSDI'25) on blocks (OmniReduce, SIGCOMM'21).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from wavemare.comm.blocks.layout import BlockLayout, Index, assign_owners
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, num_chunks, pipelined


def push_pull(call: CollectiveCall, masks: Masks) -> None:
    """Sum blocks at the owners of `assign_owners`.

    Sends (N-1)/N (d + u) of the bucket in each direction: never more than dense or packed.
    """
    with call.phase("plan"):
        layout = assign_owners(masks)

    def put_back(part: BlockLayout, summed: Tensor) -> None:
        with call.phase("unpack"):
            call.kernels.scatter(summed, call.block, call.index(part.blocks), call.flat)

    push_and_pull(call, layout, put_back)


def push_and_pull(
    call: CollectiveCall,
    layout: BlockLayout,
    use: Callable[[BlockLayout, Tensor], None],
    held: Index | None = None,
) -> None:
    """Sum blocks at their owners and send the sums to all ranks, chunk by chunk.

    Args:
        call: The call; its bucket is only read, except by ``use``.
        layout: Who owns what; no block twice.
        use: Called for each chunk with its part of the layout and (B * block,) sums in its order,
            when the chunk's blocks in the bucket are no longer read.
        held: (k,), the blocks that this rank's bucket consists of, ascending; None if of all.
    """
    owned = layout.blocks.size / call.size * call.block * call.flat.element_size()
    count = num_chunks(owned)
    first, second = [], []
    summed = call.packed("summed", layout.blocks.size)
    start = 0
    for number, part in enumerate(layout.chunks(count)):
        sums = summed[start : start + part.blocks.size * call.block]
        start += sums.numel()
        group = part.group(call.rank)
        own = sums[group.start * call.block : group.stop * call.block]
        first.append(partial(begin_push, call, part, own, number, held))
        second.append(partial(_begin_pull, call, part, sums, use))
    pipelined(first, second)


def begin_push(
    call: CollectiveCall,
    layout: BlockLayout,
    out: Tensor,
    number: int = 0,
    held: Index | None = None,
) -> Callable[[], None]:
    """Send non-zero blocks to their owners; the result sums the blocks that this rank owns.

    Args:
        call: The call; its bucket is only read.
        layout: Who owns what.
        out: (m * block,), written: the scaled sums of this rank's m blocks, in layout order.
        number: Of the chunk, whose memory it uses.
        held: As for `push_and_pull`.
    """
    rank, block, kernels, peers = call.rank, call.block, call.kernels, call.transport.peers()
    with call.phase("plan"):
        # From the next rank on, as the peers, and this rank last.
        to = layout.push_counts(slice(rank, rank + 1))[0]
        leaving = np.roll(to, -rank - 1).tolist()
        *arriving, _ = np.roll(layout.arriving_counts(rank), -rank - 1).tolist()
        blocks = np.roll(layout.pushed(rank), -to[: rank + 1].sum())
        index = call.index(blocks if held is None else np.searchsorted(held, blocks))
    # What leaves, this rank's own blocks, what arrives: one gather can fill the first two.
    memory = call.packed(f"pushed {number}", sum(leaving) + sum(arriving))
    parts = memory.split([count * block for count in (*leaving, *arriving)])
    received = memory[sum(leaving[:-1]) * block :]
    exchange = call.transport.begin()
    for peer, part in zip(peers, parts[len(leaving) :], strict=True):
        exchange.receive(peer, part)
    if call.on_device:  # one launch, and no two events for each peer
        with call.phase("pack"):
            kernels.gather(call.flat, block, index, memory[: index.numel() * block])
        with call.phase("push"):
            for owner, part in zip(peers, parts, strict=False):
                exchange.send(owner, part)
    else:
        for owner, part, own in zip((*peers, rank), parts, index.split(leaving), strict=False):
            if not own.numel():
                continue
            # Pack for one peer while sending to the previous one.
            with call.phase("pack"):
                kernels.gather(call.flat, block, own, part)
            if owner != rank:
                with call.phase("push"):
                    exchange.send(owner, part)
    exchange.start()
    with call.phase("plan"):
        sources = call.index(layout.sources(rank))

    def finish() -> None:
        with call.phase("push"):
            exchange.wait()
        with call.phase("reduce"):
            kernels.reduce(received, sources, block, call.scale, out)

    return finish


def _begin_pull(
    call: CollectiveCall,
    layout: BlockLayout,
    summed: Tensor,
    use: Callable[[BlockLayout, Tensor], None],
) -> Callable[[], None]:
    parts = summed.split((np.diff(layout.edges) * call.block).tolist())
    with call.phase("pull"):
        exchange = call.transport.begin_all_gather(parts)

    def finish() -> None:
        with call.phase("pull"):
            exchange.wait()
        use(layout, summed)

    return finish
