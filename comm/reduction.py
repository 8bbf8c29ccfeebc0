# SPDX-License-Identifier: Apache-2.0
"""Sums one bucket, from its mask to its result; runs on the thread of a `SparseComm`."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavemare.comm.agreement import exchange_masks
from wavemare.comm.blocks.layout import OwnedRange
from wavemare.comm.blocks.masks import Masks, mask_bytes
from wavemare.comm.compressor import Compressor
from wavemare.comm.executors import EXECUTORS_BY_MODE, CollectiveCall, Scratch
from wavemare.comm.executors.ranges import (
    equal_ranges,
    gather_ranges,
    reduce_ranges,
    reduce_scatter,
)
from wavemare.comm.kernels import kernels_for, num_blocks
from wavemare.comm.selection.cost import Constants
from wavemare.comm.selection.selector import DENSE, Selector
from wavemare.comm.statistics import Statistics
from wavemare.comm.transport import Transport
from wavemare.errors import CommError

__all__ = ["Hierarchy", "Reduction"]


@dataclass(frozen=True)
class Hierarchy:
    """The ranks of this node, and the ranks with the same number on the other nodes.

    Within a node every rank sums a shard. Ranks with the same number then sum their shards
    sparsely, which uses all network interfaces of a node. Sums within a node are denser than a
    rank's gradient: 1 - (1-d)^G for G ranks with independent masks of density d.

    Args:
        within: Transport among the ranks of this node.
        between: Transport among the ranks with this number.
    """

    within: Transport
    between: Transport

    @classmethod
    def find(cls, transport: Transport, node: str | None = None) -> Hierarchy | None:
        """Find the nodes; collective over all ranks.

        Args:
            transport: Among all ranks.
            node: This rank's node; the machine's name if omitted.

        Returns:
            None if there is one node, or one rank per node.

        Raises:
            CommError: The nodes have different numbers of ranks.
        """
        colour = zlib.crc32((transport.host if node is None else node).encode())
        mine = torch.tensor([colour], device=transport.message_device)
        table = mine.new_empty(transport.size, 1)
        transport.all_gather(mine, table)
        colours = table[:, 0].tolist()
        sizes = {other: colours.count(other) for other in colours}
        if len(set(sizes.values())) > 1:
            raise CommError(
                "hierarchical",
                True,
                f"the nodes have different numbers of ranks: {sorted(sizes.values())}",
                "Start as many ranks on each node, or set it to false",
            )
        if len(sizes) in {1, transport.size}:
            return None
        number = colours[: transport.rank].count(colour)
        # MPI colours have 31 bits: use the node's first rank.
        return cls(transport.split(colours.index(colour)), transport.split(number))

    def close(self) -> None:
        """Close both transports."""
        self.within.close()
        self.between.close()


class Reduction:
    """Sums buckets by the executor of the mode, or the one that the selector chooses.

    Args:
        transport: Among all ranks.
        hierarchy: If ranks of a node sum among themselves first.
        block: Elements per block.
        mode: ``auto`` or the name of an executor.
        constants: Of the cost model.
        allowed: Executors for the selector.
        compressor: Selects the blocks that each rank sends.
        scratch: Memory to use.
    """

    def __init__(
        self,
        transport: Transport,
        hierarchy: Hierarchy | None,
        *,
        block: int,
        mode: str,
        constants: Constants,
        allowed: Sequence[str],
        compressor: Compressor | None,
        scratch: Scratch,
    ) -> None:
        self.selector = Selector(constants, allowed)
        self._transport = transport
        self._hierarchy = hierarchy
        self._block = block
        self._mode = mode
        self._compressor = compressor
        self._scratch = scratch
        self._took: dict[str, tuple[str, float, float]] = {}

    def took_ns(self, key: str) -> int:
        """Return the nanoseconds of a bucket's previous call, 0 if unknown."""
        return int(1e9 * self._took[key][1]) if key in self._took else 0

    def learn(self, key: str, times_ns: Sequence[int]) -> None:
        """Correct the predictions by the times of a bucket's previous call on all ranks.

        The least time counts: the other ranks' times include waiting for another rank.
        """
        # With a hierarchy, each group between nodes has its own shard and chooses by itself.
        if key in self._took and min(times_ns) > 0 and self._hierarchy is None:
            executor, _, predicted = self._took.pop(key)
            self.selector.learn(key, executor, 1e-9 * min(times_ns) / predicted)

    def all_reduce(
        self, flat: Tensor, key: str, scale: float, weights: Tensor | None, stats: Statistics
    ) -> None:
        """Replace each rank's bucket by the scaled sum of all buckets.

        Args:
            flat: (E,), the bucket.
            key: Its name.
            scale: Factor of the sum.
            weights: (E,), the weights of this gradient, for a compressor.
            stats: Filled in.
        """
        self._compress(flat, key, weights)
        if self._hierarchy is None:
            self._sum(self._call(flat, self._transport, scale, stats), key, stats)
            return
        # Dense within the node, then each rank's shard sparsely between nodes. Both scale: a node's
        # sum may overflow 16 bits.
        parts = self._hierarchy.within.size if scale != 1 else 1
        within = self._call(flat, self._hierarchy.within, 1 / parts, stats)
        ranges = equal_ranges(flat.numel(), self._block, within.size)
        reduce_ranges(within, ranges)
        shard = flat[ranges[within.rank].start : ranges[within.rank].stop]
        between = self._call(shard, self._hierarchy.between, scale * parts, stats)
        self._sum(between, key, stats)
        gather_ranges(within, ranges)

    def reduce_scatter(
        self,
        flat: Tensor,
        ranges: Sequence[OwnedRange],
        key: str,
        scale: float,
        weights: Tensor | None,
        stats: Statistics,
    ) -> None:
        """Put the scaled sum of each range on its owner; arguments as for `all_reduce`."""
        self._compress(flat, key, weights)
        self._sum(self._call(flat, self._transport, scale, stats), key, stats, ranges)

    def all_gather(self, flat: Tensor, ranges: Sequence[OwnedRange], stats: Statistics) -> None:
        """Copy each range from its owner to all ranks."""
        stats.executor = "dense"
        gather_ranges(self._call(flat, self._transport, 1.0, stats), ranges)

    def _call(
        self, flat: Tensor, transport: Transport, scale: float, stats: Statistics
    ) -> CollectiveCall:
        return CollectiveCall(flat, self._block, scale, transport, self._scratch, stats.phases_s)

    def _compress(self, flat: Tensor, key: str, weights: Tensor | None) -> None:
        if self._compressor is not None:
            self._compressor.step(key, flat, weights)

    def _sum(
        self,
        call: CollectiveCall,
        key: str,
        stats: Statistics,
        ranges: Sequence[OwnedRange] | None = None,
    ) -> None:
        """Sum by the mode's executor or the selector's choice; by ranges, only at their owners."""
        if self._mode != "auto":
            stats.executor = name = self._mode
            masks = self._masks(call) if EXECUTORS_BY_MODE[name].needs_masks else None
            _note(stats, masks)
            _run(name, call, masks, ranges)
            return
        started = time.perf_counter()
        if not self.selector.looks(key):
            name, masks, predicted = self.selector.dense(key), None, None
        else:
            masks = self._masks(call)
            block_bytes = self._block * call.flat.element_size()
            plan = self.selector.choose(key, masks, block_bytes, halves=ranges is not None)
            name, predicted = plan.executor, plan.predicted_s[plan.executor]
            _note(stats, masks)
        stats.executor, stats.predicted_s = name, predicted
        if name in DENSE:
            started = time.perf_counter()  # without the mask, which dense calls rarely take
        _run(name, call, masks, ranges)
        if call.flat.is_cuda:
            torch.cuda.current_stream(call.flat.device).synchronize()
        if predicted is not None:
            self._took[key] = name, time.perf_counter() - started, predicted

    def _masks(self, call: CollectiveCall) -> Masks:
        blocks = num_blocks(call.flat.numel(), call.block)
        with call.phase("mask"):
            like = torch.empty(0, dtype=torch.uint8, device=call.flat.device)
            bits = self._scratch("bits", mask_bytes(blocks), like)
            kernels_for(call.flat.device.type).mask(call.flat, call.block, bits)
        with call.phase("metadata"):
            return exchange_masks(call.transport, bits, blocks)


def _run(
    name: str, call: CollectiveCall, masks: Masks | None, ranges: Sequence[OwnedRange] | None
) -> None:
    if ranges is None:
        EXECUTORS_BY_MODE[name].all_reduce(call, masks)
    elif name == "ordered":
        reduce_ranges(call, ranges)
    else:
        assert masks is not None
        reduce_scatter(call, masks, ranges)


def _note(stats: Statistics, masks: Masks | None) -> None:
    if masks is not None and masks.num_blocks:
        stats.density = float(masks.counts.mean()) / masks.num_blocks
        stats.union = masks.union_size / masks.num_blocks
