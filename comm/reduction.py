# SPDX-License-Identifier: Apache-2.0
"""Sums one bucket, from its mask to its result; runs on the thread of a `SparseComm`."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavemare.comm.agreement import Agreement, Reported, exchange_masks
from wavemare.comm.blocks.layout import OwnedRange
from wavemare.comm.blocks.masks import BlockCounts, Masks, bits_of, first_bit, mask_bytes
from wavemare.comm.compressor import Compressor
from wavemare.comm.executors import EXECUTORS_BY_MODE, CollectiveCall, Scratch
from wavemare.comm.executors.ranges import (
    equal_ranges,
    gather_ranges,
    reduce_ranges,
    reduce_scatter,
)
from wavemare.comm.selection.cost import Constants
from wavemare.comm.selection.selector import DENSE, Selector
from wavemare.comm.statistics import Statistics, Timer
from wavemare.comm.transport import Transport
from wavemare.errors import CommError

_SAMPLE = 128
"""Blocks that are looked at to find a bucket dense, or a list of blocks wrong."""
_CHECK_INTERVAL = 251
"""Calls between two checks of all of a caller's list of blocks; a prime, as steps repeat in
patterns. The calls 0, 1, 2, 4, 8, ... are checked too, and a sample in each call."""
_TRIALS = 8
"""Calls of a bucket in which a wrong list is not an error: lists are not used from then on. Nor is
it in any call in which most of the sample is not zero: a term of all rows has just begun."""


@dataclass(frozen=True)
class Bucket:
    """A gradient to be summed.

    Args:
        flat: (E,), its elements.
        key: Its name.
        scale: Factor of the sum.
        weights: (E,), the weights of this gradient, for a compressor.
        blocks: (k,), int64, the blocks that may be non-zero on this rank; None if unknown.
    """

    flat: Tensor
    key: str
    scale: float
    weights: Tensor | None = None
    blocks: Tensor | None = None


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
        mine = torch.tensor([colour])
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
        always_checks: Whether each list of blocks is compared with the bucket.
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
        always_checks: bool = False,
    ) -> None:
        self.selector = Selector(constants, allowed)
        self._transport = transport
        self._hierarchy = hierarchy
        self._block = block
        self._mode = mode
        self._compressor = compressor
        self._scratch = scratch
        self._always_checks = always_checks
        self._num_lists: Counter[str] = Counter()
        self._searched: set[str] = set()
        self._took: dict[str, tuple[str, Timer, float]] = {}

    def all_reduce(self, bucket: Bucket, agreement: Agreement, stats: Statistics) -> None:
        """Replace each rank's bucket by the scaled sum of all buckets.

        Args:
            bucket: It.
            agreement: Of this call, not begun.
            stats: Filled in.

        Raises:
            CommError: A rank makes another call, or has not listed a non-zero block.
        """
        flat, scale = bucket.flat, bucket.scale
        if not flat.numel():
            agreement.agree()
            return
        agreed = self._compress(bucket, agreement)
        if self._hierarchy is None:
            call = self._call(flat, self._transport, scale, stats)
            self._sum(call, bucket, stats, agreed)
            return
        if agreed is not None:
            agreement.agree()
        # Dense within the node, then each rank's shard sparsely between nodes. Both scale: a node's
        # sum may overflow 16 bits.
        parts = self._hierarchy.within.size if scale != 1 else 1
        within = self._call(flat, self._hierarchy.within, 1 / parts, stats)
        ranges = equal_ranges(flat.numel(), self._block, within.size)
        reduce_ranges(within, ranges)
        shard = flat[ranges[within.rank].start : ranges[within.rank].stop]
        between = self._call(shard, self._hierarchy.between, scale * parts, stats)
        self._sum(between, Bucket(shard, bucket.key, between.scale), stats)
        gather_ranges(within, ranges)

    def reduce_scatter(
        self,
        bucket: Bucket,
        ranges: Sequence[OwnedRange],
        agreement: Agreement,
        stats: Statistics,
    ) -> None:
        """Put the scaled sum of each range on its owner; arguments as for `all_reduce`."""
        if not bucket.flat.numel():
            agreement.agree()
            return
        agreed = self._compress(bucket, agreement)
        call = self._call(bucket.flat, self._transport, bucket.scale, stats)
        self._sum(call, bucket, stats, agreed, ranges)

    def all_gather(
        self, flat: Tensor, ranges: Sequence[OwnedRange], agreement: Agreement, stats: Statistics
    ) -> None:
        """Copy each range from its owner to all ranks."""
        agreement.agree()
        stats.executor = "dense"
        gather_ranges(self._call(flat, self._transport, 1.0, stats), ranges)

    def _call(
        self, flat: Tensor, transport: Transport, scale: float, stats: Statistics
    ) -> CollectiveCall:
        return CollectiveCall(flat, self._block, scale, transport, self._scratch, stats)

    def _compress(self, bucket: Bucket, agreement: Agreement) -> Agreement | None:
        """Compress a bucket, if that is wanted; returns the agreement if it has yet to begin."""
        if self._compressor is None:
            return agreement
        # Before the residuals change.
        agreement.begin(Reported(self._took_ns(bucket.key)))
        self._check(agreement.wait(), bucket.key)
        self._compressor.step(bucket.key, bucket.flat, bucket.weights)
        return None

    def _took_ns(self, key: str) -> int:
        took = self._took.get(key)
        return int(1e9 * took[1].seconds) if took is not None and took[1].ended else 0

    def _sum(
        self,
        call: CollectiveCall,
        bucket: Bucket,
        stats: Statistics,
        agreement: Agreement | None = None,
        ranges: Sequence[OwnedRange] | None = None,
    ) -> None:
        """Sum by the mode's executor or the selector's choice; by ranges, only at their owners."""
        timer = Timer(call.flat.device)
        found, searched = self._look(call, bucket, agreement, halves=ranges is not None)
        masks = found if isinstance(found, Masks) else None
        if masks is not None and masks.num_blocks:
            stats.union = masks.union_size / masks.num_blocks
        if found is not None and found.num_blocks:
            stats.density = float(found.counts.mean()) / found.num_blocks
        name, predicted = self._mode, None
        if name == "auto":
            assert found is not None
            plan = self.selector.choose(
                bucket.key,
                found,
                self._block * call.flat.element_size(),
                halves=ranges is not None,
                searched=searched,
            )
            name, predicted = plan.executor, plan.predicted_s[plan.executor]
        stats.executor, stats.predicted_s = name, predicted
        if name in DENSE:
            timer = Timer(call.flat.device)  # without the mask, which dense calls rarely take
        if ranges is None:
            EXECUTORS_BY_MODE[name].all_reduce(call, masks)
        elif name == "ordered":
            reduce_ranges(call, ranges)
        else:
            assert masks is not None
            reduce_scatter(call, masks, ranges)
        timer.stop()
        if predicted is not None:
            self._took[bucket.key] = name, timer, predicted

    def _look(
        self,
        call: CollectiveCall,
        bucket: Bucket,
        agreement: Agreement | None,
        *,
        halves: bool,
    ) -> tuple[Masks | BlockCounts | None, bool]:
        """Agree on the call, and find the non-zero blocks of all ranks.

        Returns:
            Their masks; by a sample their numbers alone, if all ranks find their buckets dense;
            None if the executor needs neither. And whether any rank has no list of its blocks.
        """
        took_ns = self._took_ns(bucket.key)
        if self._mode != "auto" and not EXECUTORS_BY_MODE[self._mode].needs_masks:
            if agreement is not None:
                agreement.begin()
                self._check(agreement.wait(), bucket.key)
            return None, True
        stray, bits = -1, None
        if bucket.blocks is not None:
            bits, stray = self._listed(call, bucket)
        dense_blocks = -1
        if agreement is not None and self._mode == "auto":
            dense_blocks = self._dense_blocks(call, bucket, bits, halves=halves)
        if agreement is not None:
            # The mask is taken while these messages travel.
            agreement.begin(Reported(took_ns, dense_blocks, stray, int(bits is None)))
        if bits is None and dense_blocks < 0:
            try:
                bits = call.mask()
            except BaseException:
                if agreement is not None:
                    agreement.wait()  # its memory must last
                raise
        searched = True
        if agreement is not None:
            with call.phase("metadata"):
                reported = self._check(agreement.wait(), bucket.key)
            searched = any(rank.searched for rank in reported)
            counts = np.array([rank.dense_blocks for rank in reported])
            if counts.min() >= 0:
                return BlockCounts(call.num_blocks, counts, int(counts.max())), searched
        if bits is None:
            bits = call.mask()
        with call.phase("metadata"):
            return exchange_masks(call.transport, bits, call.num_blocks), searched

    def _check(self, reported: Sequence[Reported], key: str) -> Sequence[Reported]:
        """Learn from the previous call's times, and refuse lists of blocks that are wrong."""
        for rank, report in enumerate(reported):
            if report.stray >= 0:
                raise CommError(
                    "blocks",
                    report.stray,
                    f"rank {rank} has not listed this block of {key}, and it is not zero; sums "
                    "since the last check may be wrong",
                    "List all blocks that may be non-zero, or give no list",
                )
        # The least time counts: the others include waiting for another rank. With a hierarchy,
        # each group between nodes has its own shard and chooses by itself.
        took_ns = min(report.took_ns for report in reported)
        if key in self._took and took_ns > 0 and self._hierarchy is None:
            executor, _, predicted = self._took.pop(key)
            self.selector.learn(key, executor, 1e-9 * took_ns / predicted)
        return reported

    def _dense_blocks(
        self, call: CollectiveCall, bucket: Bucket, bits: Tensor | None, *, halves: bool
    ) -> int:
        """Return the number of non-zero blocks; -1 if sparse sums may be faster.

        ``bits`` are the bucket's mask, if it is known; otherwise a sample is taken.
        """
        blocks = number = call.num_blocks
        searched = bits is None
        if bits is None:
            number = min(blocks, _SAMPLE)
            step = blocks // number
            with call.phase("sample"):
                bits = self._sample(call, np.arange(number, dtype=np.int64) * step + step // 2)
        count = int(np.bitwise_count(bits.cpu().numpy()).sum()) * blocks // number
        # The best case of sparse sums: all ranks have the same blocks.
        alike = BlockCounts(blocks, np.full(call.size, count), count)
        block_bytes = call.block * call.flat.element_size()
        plan = self.selector.choose(
            bucket.key,
            alike,
            block_bytes,
            halves=halves,
            searched=searched,
            tentative=True,
        )
        return count if plan.executor in DENSE else -1

    def _sample(self, call: CollectiveCall, places: NDArray[np.int64]) -> Tensor:
        """Return the bit-packed mask of some blocks."""
        packed = call.packed("sample", len(places))
        call.kernels.gather(call.flat, call.block, call.index(places), packed)
        bits = packed.new_empty(mask_bytes(len(places)), dtype=torch.uint8)
        call.kernels.mask(packed, call.block, bits)
        return bits

    def _strays(self, call: CollectiveCall, listed: Tensor, number: int) -> tuple[int, int]:
        """Return of a sample of blocks how many are listed wrongly, and how many are not listed."""
        step = max(call.num_blocks // _SAMPLE, 1)
        places = np.arange(number % step, call.num_blocks, step, dtype=np.int64)[:_SAMPLE]
        index = call.index(places)
        bits = (listed[index // 8] >> (index % 8).to(torch.uint8)) & 1
        # One copy to the host, which waits for the device.
        both = torch.cat([bits, self._sample(call, places)]).cpu().numpy()
        known, sampled = both[: len(places)], both[len(places) :]
        found = np.unpackbits(sampled, count=len(places), bitorder="little")
        return int((found > known).sum()), int((known == 0).sum())

    def _listed(self, call: CollectiveCall, bucket: Bucket) -> tuple[Tensor | None, int]:
        """Return the mask of the caller's list and, if it was checked, a block outside of it."""
        key = bucket.key
        if key in self._searched:
            return None, -1
        number, self._num_lists[key] = self._num_lists[key], self._num_lists[key] + 1
        assert bucket.blocks is not None
        with call.phase("list"):
            listed = bits_of(bucket.blocks, call.num_blocks)
            strays, unlisted = self._strays(call, listed, number)
        begins = strays and 2 * strays >= unlisted  # a term of all rows; earlier sums were right
        checks = not number & (number - 1) or not number % _CHECK_INTERVAL or strays
        if not (checks or self._always_checks):
            return listed, -1
        bits = call.mask()
        stray = first_bit(bits & ~listed)
        trial = number < _TRIALS or begins
        if stray >= 0 and trial and not self._always_checks:
            logging.getLogger("wavemare").warning(
                "%s: block %d is not in the list; lists are not used", key, stray
            )
            self._searched.add(key)
            stray = -1
        return bits, stray
