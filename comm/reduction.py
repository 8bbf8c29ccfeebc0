# SPDX-License-Identifier: Apache-2.0
"""Sums one bucket: the ranks agree on the call, find their non-zero blocks, choose, and sum.

Runs on the thread of a `SparseComm`.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.collective_queue import Finish, Statistics, Timer
from wavemare.comm.compressor import Compressor
from wavemare.comm.cost import DENSE, Constants, ExecutorChoice, Selector
from wavemare.comm.executors import (
    EXECUTORS_BY_MODE,
    CollectiveCall,
    Executor,
    Nodes,
    by_nodes,
)
from wavemare.comm.kernels import DTYPES
from wavemare.comm.masks import (
    BlockCounts,
    Index,
    Masks,
    begin_masks,
    bits_of,
    first_bit,
    mask_bytes,
    packed_bits,
)
from wavemare.comm.transport import Transport
from wavemare.errors import CommError

OPERATIONS = ("allreduce_", "reduce_scatter_", "allgather_", "allreduce_rows_", "SparseComm")
_FIELDS = 11
HEADER_BYTES = 8 * _FIELDS


def digest_of(*terms: object) -> int:
    """Return a 32-bit checksum of values."""
    return zlib.crc32(repr(terms).encode())


class Reported(NamedTuple):
    """What a rank reports about a call; it may differ from rank to rank. Of all ranks: arrays.

    Args:
        took_ns: Nanoseconds of this bucket's previous call; 0 if unknown.
        dense_blocks: Non-zero blocks of the bucket, by a sample, if so many that the rank would
            rather send all; else -1.
        stray: A non-zero block that the caller has not listed; -1 if none was found.
        searched: 1 if the caller has given no list, so that the rank reads the whole bucket.
    """

    took_ns: Any = 0
    dense_blocks: Any = -1
    stray: Any = -1
    searched: Any = 1


class Agreement:
    """One small message from each rank to all others: that all ranks make the same call.

    Args:
        transport: To the other ranks.
        operation: One of `OPERATIONS`.
        block: Elements per block.
        number: Of the call, counted from 0.
        numel: Elements of the bucket, or columns of the rows.
        dtype: Of its elements.
        num_items: Rows of a table; -1 if unknown.
        terms: Digest of everything else that must agree (see `digest_of`).
    """

    def __init__(
        self,
        transport: Transport,
        operation: str,
        *,
        block: int,
        number: int = 0,
        numel: int = 0,
        dtype: torch.dtype = torch.float32,
        num_items: int = 0,
        terms: int = 0,
    ) -> None:
        self._call = [
            number,
            OPERATIONS.index(operation),
            numel,
            DTYPES.index(dtype),
            block,
            num_items,
            terms,
        ]
        self._transport = transport

    def begin(self, reported: Reported = Reported()) -> None:  # noqa: B008
        """Send this rank's message."""
        mine = torch.tensor([*self._call, *reported], dtype=torch.int64)
        self._table = mine.new_empty(self._transport.size, _FIELDS)
        self._gathering = self._transport.begin_gather(mine, self._table)

    def wait(self) -> Reported:
        """Wait for the messages of all ranks.

        Returns:
            What all ranks report, (N,), int64, each.

        Raises:
            CommError: A rank makes another call; the message names the rank.
        """
        self._gathering.wait()
        table, same = self._table.numpy(), len(self._call)
        differs = (table[:, :same] != self._call).any(axis=1)
        if differs.any():
            rank = int(differs.argmax())
            own, other = _spell(self._call), _spell(table[rank, :same].tolist())
            if other == own:
                other = "it with another key, partition, mode, average, staging or cost model"
            raise CommError(
                "collective",
                own,
                f"rank {rank} calls {other} instead",
                "Let all ranks call the same collectives, on equal buckets, in the same order",
            )
        return Reported(*table[:, same:].T)

    def agree(self) -> None:
        """Send the message and wait for the others'."""
        self.begin()
        self.wait()


def _spell(numbers: list[int]) -> str:
    number, operation, numel, dtype, block, items, _ = numbers
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    extra = {0: "", -1: ", any rows"}.get(items, f", {items} rows")
    return f"#{number} {OPERATIONS[operation]}({numel} {kind}, block {block}{extra})"


# --- lists of the blocks that may be non-zero, which callers give ---------------------------------


SAMPLE = 128
"""Blocks that are looked at to find a bucket dense, or a list of blocks wrong."""
_CHECK_INTERVAL = 251
"""Calls between two checks of all of a caller's list of blocks; a prime, as steps repeat in
patterns. The calls 0, 1, 2, 4, 8, ... are checked too, and a sample in each call."""
_TRIALS = 8
"""Calls of a bucket in which a wrong list is not an error: lists are not used from then on. Nor is
it in any call in which most of the sample is not zero: a term of all rows has just begun."""


class BlockLists:
    """Makes masks of lists, and checks some of the lists."""

    def __init__(self) -> None:
        self._num_lists: Counter[str] = Counter()
        self._searched: set[str] = set()

    def take(self, call: CollectiveCall, blocks: Tensor | None) -> tuple[Tensor | None, int]:
        """Take the list of a bucket.

        Args:
            call: Has the bucket.
            blocks: (k,), int64, in any order; None if the caller has no list.

        Returns:
            The bit-packed mask of this rank, None if there is no list or lists are not used; and a
            block that is not zero and not in the list, -1 if none was found.
        """
        if blocks is None or call.key in self._searched:
            return None, -1
        number, self._num_lists[call.key] = self._num_lists[call.key], self._num_lists[call.key] + 1
        with call.phase("list"):
            listed = bits_of(blocks, call.num_blocks)
            strays, unlisted = _strays(call, listed, number)
        begins = strays and 2 * strays >= unlisted  # a term of all rows; earlier sums were right
        checks = not number & (number - 1) or not number % _CHECK_INTERVAL or strays
        if not checks:
            return listed, -1
        bits = call.mask()
        stray = first_bit(bits & ~listed)
        trial = number < _TRIALS or begins
        if stray >= 0 and trial:
            logging.getLogger("wavemare").warning(
                "%s: block %d is not in the list; lists are not used", call.key, stray
            )
            self._searched.add(call.key)
            stray = -1
        return bits, stray


def sample_of(num_blocks: int, shift: int) -> Index:
    """Return the numbers of at most `SAMPLE` blocks, spread evenly over a bucket.

    Args:
        num_blocks: Of the bucket, at least 1.
        shift: By how many blocks the sample is moved: shifts that follow one another reach all.
    """
    count = min(num_blocks, SAMPLE)
    return (np.arange(count, dtype=np.int64) * num_blocks // count + shift) % num_blocks


def mask_of_sample(call: CollectiveCall, places: Index) -> Tensor:
    """Return the bit-packed mask of some blocks of a bucket."""
    packed = call.flat.new_empty(len(places) * call.block)
    call.kernels.gather(call.flat, call.block, call.index(places), packed)
    bits = packed.new_empty(mask_bytes(len(places)), dtype=torch.uint8)
    call.kernels.mask(packed, call.block, bits)
    return bits


def _strays(call: CollectiveCall, listed: Tensor, number: int) -> tuple[int, int]:
    """Return of a sample of blocks how many are listed wrongly, and how many are not listed."""
    places = sample_of(call.num_blocks, number)
    index = call.index(places)
    bits = (listed[index // 8] >> (index % 8).to(torch.uint8)) & 1
    # One copy to the host, which waits for the device.
    both = torch.cat([bits, mask_of_sample(call, places)]).cpu().numpy()
    known, sampled = both[: len(places)], both[len(places) :]
    found = np.unpackbits(sampled, count=len(places), bitorder="little")
    return int((found > known).sum()), int((known == 0).sum())


# --- the sum --------------------------------------------------------------------------------------

SETTLED_CALLS = 4
"""Calls in a row that are summed by the library's reduction, after which ranks look less often."""


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
        mode: ``auto`` or the name of an executor.
        constants: Of the cost model.
        allowed: Executors for the selector.
        compressor: Selects the blocks that each rank sends.
        nodes: If ranks of a node sum among themselves first; the mode is then that of the sums
            between nodes.
    """

    def __init__(
        self,
        mode: str,
        constants: Constants,
        allowed: Sequence[str],
        compressor: Compressor | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self.selector = Selector(constants, allowed)
        self._mode = self._mode_of_sums = mode
        self._executors = dict(EXECUTORS_BY_MODE)
        self._compressor = compressor
        self._lists = BlockLists()
        self._dense_runs: Counter[str] = Counter()
        self._took: dict[str, tuple[str, Timer, float]] = {}
        # Masks on their way; after an error their memory must last.
        self._arriving: Callable[[], Masks] | None = None
        if nodes is not None:
            between = Reduction(mode, constants, allowed)
            self._mode_of_sums = "hierarchical"
            all_reduce = partial(by_nodes, nodes, between.sum_shard)
            self._executors[self._mode_of_sums] = Executor(all_reduce, needs_masks=False)

    def reduce(self, blocks: Tensor | None, call: CollectiveCall, agreement: Agreement) -> Finish:
        """Replace each rank's bucket by the scaled sum of all buckets, or its own ranges alone.

        This looks at the bucket, together with the other ranks; what it returns sums.

        Args:
            blocks: (k,), int64, the blocks that may be non-zero on this rank; None if unknown.
            call: Has the bucket.
            agreement: Of this call, not begun.

        Raises:
            CommError: A rank makes another call, or has not listed a non-zero block.
        """
        run = self._dense_runs.pop(call.key, 0)  # until this call has ended well
        if not call.flat.numel():
            agreement.agree()
            return _nothing
        timer = Timer(call.flat.device)
        mode = self._mode_of_sums if call.ranges is None else self._mode
        if self._compressor is None:
            seen = self._look(call, mode, blocks, agreement)
        else:
            # Before the residuals change.
            self._agree(agreement, Reported(self._took_ns(call.key)), call.key)
            chosen = self._compressor.step(call.key, call.flat)
            timer = Timer(call.flat.device)
            # All others are +0.0 now: nobody has to search.
            seen = self._exchange(call, mode, None if chosen is None else packed_bits(chosen))

        def finish() -> None:
            self._sum(call, mode, seen, timer)
            if call.stats.executor == "dense" and self._compressor is None:
                self._dense_runs[call.key] = run + 1

        return finish

    def is_settled(self, key: str) -> bool:
        """Whether all ranks sum a bucket by the library's reduction, call after call.

        Alike on all ranks, if the bucket's call before has ended.
        """
        return self._dense_runs[key] >= SETTLED_CALLS

    def sum_shard(self, call: CollectiveCall) -> None:
        """Sum a bucket over the ranks of the call, which have agreed on it in another group."""
        timer = Timer(call.flat.device)
        self._sum(call, self._mode, self._exchange(call, self._mode), timer)

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
            self._agree(agreement, Reported(), call.key)
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
            if bits is not None and dense_blocks < 0 and call.transport.gathers_side_by_side:
                # If the calls agree, all ranks will exchange masks: save the time of a message.
                self._arriving = begin_masks(call.transport, bits, call.num_blocks)
            reports = self._check(agreement.wait(), call.key)
        counts, searched = reports.dense_blocks, bool(reports.searched.any())
        if counts.min() >= 0:
            return Seen(BlockCounts(call.num_blocks, counts, int(counts.max())), searched)
        return self._exchange(call, mode, bits)._replace(searched=searched)

    def _exchange(self, call: CollectiveCall, mode: str, bits: Tensor | None = None) -> Seen:
        """Exchange the masks of all ranks, which have agreed on the call, if the mode needs them.

        Args:
            call: The call.
            mode: Of the sum.
            bits: This rank's mask; None to take it.
        """
        if not self._needs_masks(mode):
            return Seen()
        if bits is None:
            bits = call.mask()
        with call.phase("metadata"):
            arriving = self._arriving or begin_masks(call.transport, bits, call.num_blocks)
            masks, self._arriving = arriving(), None
        # A compressor has read the bucket anyway; in some steps of one rank alone it gives no mask.
        return Seen(masks, searched=self._compressor is None)

    def _needs_masks(self, mode: str) -> bool:
        return mode == "auto" or self._executors[mode].needs_masks

    def _agree(self, agreement: Agreement, reported: Reported, key: str) -> None:
        agreement.begin(reported)
        self._check(agreement.wait(), key)

    def _took_ns(self, key: str) -> int:
        took = self._took.get(key)
        return int(1e9 * took[1].seconds) if took is not None and took[1].ended else 0

    def _check(self, reports: Reported, key: str) -> Reported:
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
