# SPDX-License-Identifier: Apache-2.0
"""Ways to sum a bucket over all ranks.

In: a bucket and the masks of all ranks. Out: the sum, in the bucket. Whole buckets and their ranges
are summed by their owners in rank order, or by the library's reduction. Sparse buckets travel to
owners of balanced shares of the blocks (balanced parallelism of Zen, OSDI'25, on the blocks of
OmniReduce, SIGCOMM'21), or from each rank to all others. `by_nodes` sums within each node first.
The table is at the end.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.collective_queue import Statistics, Timer
from wavemare.comm.kernels import BlockKernels, kernels_for, num_blocks
from wavemare.comm.masks import (
    BlockLayout,
    Index,
    Masks,
    assign_owners,
    assign_ranges,
    gathered,
    mask_bytes,
    ranges_of,
)
from wavemare.comm.transport.base import Transport
from wavemare.errors import CommError

Begin = Callable[[], Callable[[], None]]
"""Starts messages; returns a function that waits for them and uses them."""

_CHUNK_BYTES = 4 << 20
_MOST_CHUNKS = 8


class Scratch:
    """Memory that is reused from call to call and only grows: fresh pages are slow."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, name: str, numel: int, like: Tensor) -> Tensor:
        """Return a flat tensor of undefined content.

        Args:
            name: One name is one memory.
            numel: Elements.
            like: A tensor of the wanted type and device.
        """
        key = (name, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            held = torch.empty(numel, dtype=like.dtype, device=like.device)
            self._held[key] = held
        return held[:numel]


@dataclass
class CollectiveCall:
    """One collective on one bucket.

    Args:
        flat: (E,), the bucket; the executor leaves the result in it.
        block: Elements per block.
        scale: Factor of the sum: 1/N for a mean.
        transport: To the other ranks.
        scratch: Memory to use.
        stats: Its phases are filled in.
        key: Name of the bucket.
        ranges: From `ranges_of`, if the ranges of a partition are what is summed or sent.
    """

    flat: Tensor
    block: int
    scale: float
    transport: Transport
    scratch: Scratch
    stats: Statistics = field(default_factory=Statistics)
    key: str = ""
    ranges: Index | None = None

    @property
    def kernels(self) -> BlockKernels:
        """The kernels for the bucket's device."""
        return kernels_for(self.flat.device.type)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """N."""
        return self.transport.size

    @property
    def num_blocks(self) -> int:
        """Blocks of the bucket."""
        return num_blocks(self.flat.numel(), self.block)

    @property
    def on_device(self) -> bool:
        """Whether the bucket lies on an accelerator, which takes few large pieces of work."""
        return not self.flat.is_cpu

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to a phase."""
        timer = Timer(self.flat.device)
        yield
        self.stats.note(name, timer)

    def mask(self) -> Tensor:
        """Return the bucket's bit-packed mask; see `BlockKernels.mask`."""
        with self.phase("mask"):
            # Not in scratch: sums of buckets before may still use that.
            size = mask_bytes(self.num_blocks)
            bits = torch.empty(size, dtype=torch.uint8, device=self.flat.device)
            self.kernels.mask(self.flat, self.block, bits)
        return bits

    def packed(self, name: str, num_blocks: int) -> Tensor:
        """Return scratch for ``num_blocks`` packed blocks."""
        return self.scratch(name, num_blocks * self.block, self.flat)

    def index(self, numbers: Index) -> Tensor:
        """Return block numbers as a tensor on the bucket's device; no thread waits for the copy."""
        host = torch.from_numpy(numbers)
        # Torch keeps pinned memory until the copy has read it.
        return host.pin_memory().to(self.flat.device, non_blocking=True) if self.on_device else host


def num_chunks(num_bytes: float) -> int:
    """Return the number of chunks of an owner's sums; the same on all ranks.

    Args:
        num_bytes: Bytes of one owner's sums.
    """
    return int(min(max(num_bytes // _CHUNK_BYTES, 1), _MOST_CHUNKS))


def pipelined(first: Sequence[Begin], second: Sequence[Begin]) -> None:
    """Push and pull in chunks: while one chunk is summed, others travel.

    All first rounds start at once, and each chunk's second round when its first ends.

    Args:
        first: For each chunk.
        second: For each chunk.
    """
    pushes = [begin() for begin in first]
    pulls = []
    for finish, begin in zip(pushes, second, strict=True):
        finish()
        pulls.append(begin())
    for finish in pulls:
        finish()


# --- by balanced owners of blocks -----------------------------------------------------------------


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


# --- by every rank --------------------------------------------------------------------------------


def block_allgather(call: CollectiveCall, masks: Masks) -> None:
    """Gather all blocks on each rank, and sum the union.

    Sends (N-1) d of the bucket and holds N d: for two ranks, tiny buckets, disjoint masks.
    """
    with call.phase("plan"):
        layout = gathered(masks)
    summed = call.packed("summed", layout.blocks.size)
    gather_and_sum(call, masks, masks.of_rank(call.rank), layout, summed)
    with call.phase("unpack"):
        call.kernels.scatter(summed, call.block, call.index(layout.blocks), call.flat)


def gather_and_sum(
    call: CollectiveCall, masks: Masks, own: Index, layout: BlockLayout, out: Tensor
) -> None:
    """Send this rank's blocks to all ranks, and sum the blocks of all ranks.

    Args:
        call: The call; its bucket is only read.
        masks: Of all ranks.
        own: (k,), the numbers of this rank's blocks in its bucket, ascending.
        layout: From `gathered`.
        out: (U * block,), written: the scaled sums, ascending by block.
    """
    with call.phase("pack"):
        received = call.packed("received", int(masks.counts.sum()))
        parts = received.split((masks.counts * call.block).tolist())
        call.kernels.gather(call.flat, call.block, call.index(own), parts[call.rank])
    with call.phase("push"):
        call.transport.all_gather_parts(parts)
    with call.phase("plan"):
        sources = call.index(layout.sources(0))
    with call.phase("reduce"):
        call.kernels.reduce(received, sources, call.block, call.scale, out)


# --- whole, or by ranges --------------------------------------------------------------------------


def equal_cuts(numel: int, block: int, count: int) -> Index:
    """Return (count + 1,): the borders of ranges of whole blocks, all of about the same size."""
    blocks = num_blocks(numel, block)
    return np.minimum(blocks * np.arange(count + 1) // count * block, numel)


Parts = Sequence[Sequence[Tensor]]
"""By rank, the parts of a bucket that it owns; empty ones do not travel."""


def _equal_parts(flat: Tensor, block: int, count: int) -> Parts:
    """Return one part for each rank."""
    sizes = np.diff(equal_cuts(flat.numel(), block, count)).tolist()
    return [[part] for part in flat.split(sizes)]


def _parts_of(call: CollectiveCall) -> Parts:
    assert call.ranges is not None
    parts: list[list[Tensor]] = [[] for _ in range(call.size)]
    for start, stop, owner in call.ranges.tolist():
        parts[owner].append(call.flat[start:stop])
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
        assert call.ranges is not None
        layout = assign_ranges(masks, call.block, call.ranges)
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


# --- by nodes -------------------------------------------------------------------------------------


class Nodes(NamedTuple):
    """The ranks of this node, and the ranks with the same number on the other nodes.

    Args:
        within: Transport among the ranks of this node.
        between: Transport among the ranks with this number.
    """

    within: Transport
    between: Transport

    @classmethod
    def find(cls, transport: Transport) -> Nodes | None:
        """Find the nodes; collective over all ranks.

        Args:
            transport: Among all ranks.

        Returns:
            None if there is one node, or one rank per node.

        Raises:
            CommError: The nodes have different numbers of ranks.
        """
        mine = torch.tensor([zlib.crc32(transport.host.encode())])
        table = mine.new_empty(transport.size, 1)
        transport.all_gather(mine, table)
        hosts = table[:, 0].tolist()
        sizes = Counter(hosts)
        if len(set(sizes.values())) > 1:
            raise CommError(
                "hierarchical",
                True,
                f"the nodes have different numbers of ranks: {sorted(sizes.values())}",
                "Start as many ranks on each node, or set it to false",
            )
        if len(sizes) in {1, transport.size}:
            return None
        own = hosts[transport.rank]
        # MPI colours have 31 bits: use the node's first rank.
        within, number = hosts.index(own), hosts[: transport.rank].count(own)
        return cls(transport.split(within), transport.split(number))


def by_nodes(
    nodes: Nodes,
    sum_between: Callable[[CollectiveCall], None],
    call: CollectiveCall,
    masks: Masks | None = None,
) -> None:
    """Sum within the nodes, then shards between them, and gather within the nodes.

    Within a node every rank sums a shard. Ranks with the same number then sum their shards
    sparsely, which uses all network interfaces of a node. Sums within a node are denser than a
    rank's gradient: 1 - (1-d)^G for G ranks with independent masks of density d.

    Args:
        nodes: They.
        sum_between: Sums a shard over the ranks of ``between``.
        call: Over all ranks.
        masks: Not used: the shards have their own.
    """
    # Both steps scale: a node's sum may overflow 16 bits.
    size = nodes.within.size
    parts = size if call.scale != 1 else 1
    cuts = equal_cuts(call.flat.numel(), call.block, size)
    ranges = ranges_of(cuts, call.flat.numel(), size)
    within = replace(call, transport=nodes.within, scale=1 / parts, ranges=ranges)
    reduce_ranges(within)
    shard, scale = call.flat[cuts[within.rank] : cuts[within.rank + 1]], call.scale * parts
    sum_between(replace(call, flat=shard, transport=nodes.between, scale=scale))
    gather_ranges(within)


class Executor(NamedTuple):
    """A way to sum a bucket; all ranks call it with the same masks.

    Args:
        all_reduce: Replaces each rank's bucket by the scaled sum of all buckets. Zero blocks of the
            bucket hold +0.0. It gets the masks of all ranks, if `needs_masks`.
        needs_masks: Whether it uses the masks.
        deterministic: Whether the result is the sum in rank order, starting from +0.0, in float32
            (or the bucket's type if wider or integer), scaled and rounded once. All ranks then get
            the same bits.
        reduce_scatter: As `all_reduce`, but each of the call's ranges is summed at its owner alone;
            None if there is no such form.
    """

    all_reduce: Callable[[CollectiveCall, Any], None]
    needs_masks: bool = True
    deterministic: bool = True
    reduce_scatter: Callable[[CollectiveCall, Any], None] | None = None


EXECUTORS_BY_MODE: Mapping[str, Executor] = {
    "dense": Executor(dense, needs_masks=False, deterministic=False),
    "ordered": Executor(reduce_and_gather, needs_masks=False, reduce_scatter=reduce_ranges),
    "packed": Executor(packed, deterministic=False),
    "pushpull": Executor(push_pull, reduce_scatter=reduce_scatter),
    "allgather": Executor(block_allgather),
}
