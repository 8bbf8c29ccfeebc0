# SPDX-License-Identifier: Apache-2.0
"""Sums one bucket, from its mask to its result; runs on the thread of a `SparseComm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from wavemare.comm.agreement import Agreement, Reported, Reports, exchange_masks
from wavemare.comm.blocks.layout import OwnedRange
from wavemare.comm.blocks.masks import BlockCounts, Masks, packed_bits
from wavemare.comm.collective_queue import Finish
from wavemare.comm.compressor import Compressor
from wavemare.comm.executors import EXECUTORS_BY_MODE, CollectiveCall, Executor, Scratch
from wavemare.comm.executors.hierarchy import Hierarchy
from wavemare.comm.executors.ranges import gather_ranges
from wavemare.comm.lists import SAMPLE, BlockLists, mask_of_sample, sample_of
from wavemare.comm.selection.cost import Constants
from wavemare.comm.selection.selector import DENSE, ExecutorChoice, Selector
from wavemare.comm.statistics import Statistics, Timer
from wavemare.comm.transport import Transport
from wavemare.errors import CommError


@dataclass(frozen=True)
class Bucket:
    """A gradient to be summed, or parts of it.

    Args:
        flat: (E,), its elements.
        key: Its name.
        scale: Factor of the sum.
        blocks: (k,), int64, the blocks that may be non-zero on this rank; None if unknown.
        ranges: Each is summed at its owner, or sent by it; None to sum all at all ranks.
    """

    flat: Tensor
    key: str
    scale: float
    blocks: Tensor | None = None
    ranges: Sequence[OwnedRange] | None = None


class Seen(NamedTuple):
    """What all ranks have seen of a bucket before they sum it; the same on all of them.

    Args:
        blocks: The masks of all ranks; by samples their numbers of non-zero blocks alone, if all
            ranks find their buckets dense; None if the executor needs neither.
        searched: Whether any rank has no list of its blocks, so that it reads its whole bucket.
    """

    blocks: Masks | BlockCounts | None = None
    searched: bool = True

    @property
    def masks(self) -> Masks | None:
        """The masks of all ranks, if they are known."""
        return self.blocks if isinstance(self.blocks, Masks) else None

    def describe(self, stats: Statistics) -> None:
        """Write the shares of non-zero blocks into the statistics of a call."""
        if self.blocks is None or not self.blocks.num_blocks:
            return
        stats.density = float(self.blocks.counts.mean()) / self.blocks.num_blocks
        if self.masks is not None:
            stats.union = self.masks.union_size / self.masks.num_blocks


def _nothing() -> None:
    """Sum a bucket without elements."""


class Reduction:
    """Sums buckets by the executor of the mode, or the one that the selector chooses.

    Args:
        transport: Among all ranks.
        block: Elements per block.
        mode: ``auto`` or the name of an executor.
        constants: Of the cost model.
        allowed: Executors for the selector.
        scratch: Memory to use.
        compressor: Selects the blocks that each rank sends.
        hierarchy: If ranks of a node sum among themselves first; the mode is then that of the sums
            between nodes.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        block: int,
        mode: str,
        constants: Constants,
        allowed: Sequence[str],
        scratch: Scratch,
        compressor: Compressor | None = None,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        self.selector = Selector(constants, allowed)
        self._transport = transport
        self._block = block
        self._mode = self._mode_of_sums = mode
        self._executors = dict(EXECUTORS_BY_MODE)
        self._compressor = compressor
        self._scratch = scratch
        self._lists = BlockLists()
        self._took: dict[str, tuple[str, Timer, float]] = {}
        if hierarchy is not None:
            between = Reduction(
                hierarchy.between,
                block=block,
                mode=mode,
                constants=constants,
                allowed=allowed,
                scratch=scratch,
            )
            self._mode_of_sums = "hierarchical"
            all_reduce = partial(hierarchy.all_reduce, between.sum_shard)
            self._executors["hierarchical"] = Executor(all_reduce, needs_masks=False)

    def reduce(self, bucket: Bucket, agreement: Agreement, stats: Statistics) -> Finish:
        """Replace each rank's bucket by the scaled sum of all buckets, or its own ranges alone.

        The call looks at the bucket, together with the other ranks; what it returns sums.

        Args:
            bucket: It.
            agreement: Of this call, not begun.
            stats: Filled in.

        Raises:
            CommError: A rank makes another call, or has not listed a non-zero block.
        """
        if not bucket.flat.numel():
            agreement.agree()
            return _nothing
        call, timer = self._call(bucket, stats), Timer(bucket.flat.device)
        mode = self._mode_of_sums if bucket.ranges is None else self._mode
        if self._compressor is None:
            seen = self._look(call, mode, bucket.blocks, agreement)
        else:
            # Before the residuals change.
            agreement.begin(Reported(self._took_ns(bucket.key)))
            self._check(agreement.wait(), bucket.key)
            chosen = self._compressor.step(bucket.key, bucket.flat)
            timer = Timer(bucket.flat.device)
            # All others are +0.0 now: nobody has to search.
            seen = self._look_on(call, mode, None if chosen is None else packed_bits(chosen))
        return partial(self._sum, call, mode, seen, timer)

    def all_gather(self, bucket: Bucket, agreement: Agreement, stats: Statistics) -> Finish:
        """Copy each range from its owner to all ranks; as `reduce`."""
        agreement.agree()
        stats.executor = "dense"
        return partial(gather_ranges, self._call(bucket, stats))

    def sum_shard(self, call: CollectiveCall) -> None:
        """Sum a bucket over the ranks of the call, which have agreed on it in another group."""
        timer = Timer(call.flat.device)
        self._sum(call, self._mode, self._look_on(call, self._mode), timer)

    def _call(self, bucket: Bucket, stats: Statistics) -> CollectiveCall:
        return CollectiveCall(
            bucket.flat,
            self._block,
            bucket.scale,
            self._transport,
            self._scratch,
            stats,
            bucket.key,
            bucket.ranges,
        )

    def _sum(self, call: CollectiveCall, mode: str, seen: Seen, timer: Timer) -> None:
        """Sum by the mode's executor or the selector's choice; by ranges, only at their owners."""
        seen.describe(call.stats)
        name, predicted = mode, None
        if mode == "auto":
            choice = self._choose(call, seen)
            name, predicted = choice.executor, choice.predicted_s[choice.executor]
        elif mode == "dense" and not call.transport.reduces(call.flat.dtype):
            name = "ordered"  # the library has no sum of this type
        call.stats.executor, call.stats.predicted_s = name, predicted
        if name in DENSE:
            timer = Timer(call.flat.device)  # without the mask, which dense calls rarely take
        executor = self._executors[name]
        run = executor.all_reduce if call.ranges is None else executor.reduce_scatter
        assert run is not None
        run(call, seen.masks)
        timer.stop()
        if predicted is not None:
            self._took[call.key] = name, timer, predicted

    def _choose(
        self, call: CollectiveCall, seen: Seen, *, tentative: bool = False
    ) -> ExecutorChoice:
        assert seen.blocks is not None
        return self.selector.choose(
            call.key,
            seen.blocks,
            call.block * call.flat.element_size(),
            halves=call.ranges is not None,
            searched=seen.searched,
            reduces=call.transport.reduces(call.flat.dtype),
            tentative=tentative,
        )

    def _look(
        self, call: CollectiveCall, mode: str, blocks: Tensor | None, agreement: Agreement
    ) -> Seen:
        """Agree on the call, and find the non-zero blocks of all ranks."""
        if not self._needs_masks(mode):
            agreement.begin()
            self._check(agreement.wait(), call.key)
            return Seen()
        bits, stray = self._lists.take(call, blocks)
        dense_blocks = self._dense_blocks(call, bits) if mode == "auto" else -1
        # The mask is taken while these messages travel.
        agreement.begin(Reported(self._took_ns(call.key), dense_blocks, stray, int(bits is None)))
        if bits is None and dense_blocks < 0:
            try:
                bits = call.mask()
            except BaseException:
                agreement.wait()  # its memory must last
                raise
        with call.phase("metadata"):
            reports = self._check(agreement.wait(), call.key)
        counts, searched = reports.dense_blocks, bool(reports.searched.any())
        if counts.min() >= 0:
            return Seen(BlockCounts(call.num_blocks, counts, int(counts.max())), searched)
        return Seen(self._masks(call, bits), searched)

    def _needs_masks(self, mode: str) -> bool:
        return mode == "auto" or self._executors[mode].needs_masks

    def _look_on(self, call: CollectiveCall, mode: str, bits: Tensor | None = None) -> Seen:
        """Find the non-zero blocks of all ranks, which have agreed on the call."""
        if not self._needs_masks(mode):
            return Seen()
        return Seen(self._masks(call, bits), searched=bits is None)

    def _masks(self, call: CollectiveCall, bits: Tensor | None = None) -> Masks:
        """Exchange masks; this rank's is taken if it is not given."""
        if bits is None:
            bits = call.mask()
        with call.phase("metadata"):
            return exchange_masks(call.transport, bits, call.num_blocks)

    def _took_ns(self, key: str) -> int:
        took = self._took.get(key)
        return int(1e9 * took[1].seconds) if took is not None and took[1].ended else 0

    def _check(self, reports: Reports, key: str) -> Reports:
        """Learn from the previous call's times, and refuse lists of blocks that are wrong."""
        wrong = np.flatnonzero(reports.stray >= 0)
        if wrong.size:
            raise CommError(
                "blocks",
                int(reports.stray[wrong[0]]),
                f"rank {wrong[0]} has not listed this block of {key}, and it is not zero; sums "
                "since the last check may be wrong",
                "List all blocks that may be non-zero, or give no list",
            )
        # The least time counts: the others include waiting for another rank.
        took_ns = int(reports.took_ns.min())
        if key in self._took and took_ns > 0:
            executor, _, predicted = self._took.pop(key)
            self.selector.learn(key, executor, 1e-9 * took_ns / predicted)
        return reports

    def _dense_blocks(self, call: CollectiveCall, bits: Tensor | None) -> int:
        """Return the number of non-zero blocks; -1 if sparse sums may be faster.

        ``bits`` are the bucket's mask, if it is known; otherwise a sample is taken.
        """
        blocks = number = call.num_blocks
        searched = bits is None
        if bits is None:
            with call.phase("sample"):
                places = sample_of(blocks, blocks // SAMPLE // 2)
                bits, number = mask_of_sample(call, places), len(places)
        count = int(np.bitwise_count(bits.cpu().numpy()).sum()) * blocks // number
        # The best case of sparse sums: all ranks have the same blocks.
        alike = Seen(BlockCounts(blocks, np.full(call.size, count), count), searched)
        return count if self._choose(call, alike, tentative=True).executor in DENSE else -1
