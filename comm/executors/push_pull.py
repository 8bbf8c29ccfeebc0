"""Push non-zero blocks to balanced owners, sum them there in order, pull the sums.

This is balanced parallelism (Zen, OSDI'25) on blocks (OmniReduce, SIGCOMM'21).
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from wavemare.comm.executors.base import Call, Executor
from wavemare.comm.layout import Layout, deal
from wavemare.comm.masks import Masks

__all__ = ["PushPull", "pull", "push"]


class PushPull(Executor):
    """(N-1)/N (d + u) of the bucket in each direction: never more than dense or packed."""

    name = "pushpull"

    def all_reduce(self, call: Call, masks: Masks | None) -> None:
        """Sum at the owners that `deal` chooses."""
        assert masks is not None
        with call.phase("plan"):
            layout = deal(masks)
        summed = call.packed("summed", layout.blocks.size)
        own = layout.group(call.rank)
        push(call, layout, summed[own.start * call.block : own.stop * call.block])
        pull(call, layout, summed)
        with call.phase("unpack"):
            call.kernels.scatter(summed, call.block, call.index(layout.blocks), call.flat)


def push(call: Call, layout: Layout, out: Tensor) -> None:
    """Send non-zero blocks to their owners, and sum what is this rank's.

    Args:
        call: The call; its bucket is only read.
        layout: Who owns what.
        out: (m * block,), written: the scaled sums of this rank's m blocks, in the layout's order.
    """
    rank, block, kernels = call.rank, call.block, call.kernels
    counts = layout.push_counts()
    arriving = counts[:, rank].tolist()
    received = call.packed("received", sum(arriving))
    parts = received.split([count * block for count in arriving])
    sent = call.packed("sent", int(counts[rank].sum()) - arriving[rank])
    exchange = call.transport.begin()
    for peer in call.transport.peers():
        exchange.receive(peer, parts[peer])
    start = 0
    for peer in call.transport.peers():
        # Packing for one peer overlaps with sending to the one before.
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
        places = call.index(layout.places(rank))
    with call.phase("push"):
        exchange.wait()
    with call.phase("reduce"):
        kernels.reduce(received, places, block, call.scale, out)


def pull(call: Call, layout: Layout, summed: Tensor) -> None:
    """Give all ranks all sums.

    Args:
        call: The call; its bucket is not touched.
        layout: Who owns what.
        summed: (B * block,): this rank's sums in their place; the others' are filled in.
    """
    edges = (layout.edges * call.block).tolist()
    parts = [summed[start:stop] for start, stop in pairwise(edges)]
    with call.phase("pull"):
        call.transport.all_gather_parts(parts)
