# SPDX-License-Identifier: Apache-2.0
"""The streaming protocol of OmniReduce (SIGCOMM'21) as state machines that know no network.

Blocks ``l, l + L, l + 2 L, ...`` of a bucket make up *lane* l. Some neighbouring lanes make up a
*slot*, which is served by one message at a time in each direction (*block fusion*). Every rank is a
*worker*, which holds a bucket, and the *aggregator* of the slots ``s % N == rank``.

* Each worker begins with the first block of every lane, zero or not. With each block it sends the
  number of its next non-zero block in the lane (its *look-ahead*), or a number of the lane beyond
  the bucket.
* When the aggregator has a block of all workers that have it, it sends all workers the sum and the
  least of their look-aheads, which is the block that it sums next.
* A worker whose look-ahead is that block sends it; the others stay silent.

No rank sees another's mask. Non-zero blocks travel up, and their union down.

To bound the replies in flight to a silent worker (the paper rotates over 256 versions), all workers
answer every `Lanes.answer_interval`-th reply of a slot, with blocks or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """How a bucket is cut into slots; the same on all ranks.

    Args:
        num_blocks: Blocks of the bucket.
        num_ranks: N.
        max_slots: Slots if there are blocks for so many.
        width: Lanes of a slot, and so the most blocks of a message.
        answer_interval: Replies of a slot between two that all workers answer.
    """

    num_blocks: int
    num_ranks: int
    max_slots: int
    width: int
    answer_interval: int = 8

    @property
    def count(self) -> int:
        """L; a lane whose number is beyond the bucket has no block."""
        return self.max_slots * self.width

    @property
    def num_slots(self) -> int:
        """Slots that have a block."""
        return -(-min(self.num_blocks, self.count) // self.width)

    def owner(self, slot: int) -> int:
        """Return the rank that aggregates a slot."""
        return slot % self.num_ranks

    def first_blocks(self, slot: int) -> Index:
        """Return the first block of each lane of a slot, which is also the lane's number."""
        start = slot * self.width
        return np.arange(start, min(start + self.width, self.num_blocks), dtype=np.int64)

    def columns(self, blocks: Index) -> Index:
        """Return the positions of blocks' lanes within their slot; also of a lane's end."""
        return blocks % self.count % self.width

    def first_nonzero_from(self, nonzero: npt.NDArray[np.bool_]) -> Index:
        """Return for each block the first one of its lane that is not zero, itself included.

        Args:
            nonzero: (num_blocks,), bool.

        Returns:
            (n,), int64, long enough for the number that comes after any block in its lane. Where
            nothing is left, a lane has its own number beyond the bucket.
        """
        rows = -(-self.num_blocks // self.count)
        numbers = np.arange((rows + 1) * self.count, dtype=np.int64)
        # The row behind the last one holds the lanes' ends.
        found = np.tile(numbers[rows * self.count :], rows + 1)
        found[: self.num_blocks][nonzero] = numbers[: self.num_blocks][nonzero]
        backwards = found.reshape(rows + 1, self.count)[::-1]
        np.minimum.accumulate(backwards, axis=0, out=backwards)
        return found


class MessageKind(IntEnum):
    """Of a worker, of an aggregator, or the last one of a rank."""

    UP = 0
    DOWN = 1
    END = 2


@dataclass(frozen=True, eq=False)
class Message:
    """Header of a message; its blocks follow.

    Args:
        slot: Number of the slot.
        kind: Who sent it.
        blocks: (k,), int64: block numbers, at most one per lane.
        nexts: (k,), int64: the next non-zero block in each lane, of this worker or of any.
    """

    slot: int
    kind: MessageKind
    blocks: Index
    nexts: Index


@dataclass(frozen=True, eq=False)
class Reply:
    """What an aggregator sums and sends to all workers.

    Args:
        message: To all workers.
        sources: (N, k), int64: for each worker and block, its number in that worker's last
            message; -1 if absent.
        all_answered: Whether all workers have answered the reply before, and so have received it.
    """

    message: Message
    sources: Index
    all_answered: bool


class Worker:
    """Decides what a rank sends up.

    Args:
        lanes: Of the bucket.
        nonzero: (num_blocks,), bool: this rank's mask.
    """

    def __init__(self, lanes: Lanes, nonzero: npt.NDArray[np.bool_]) -> None:
        self._lanes = lanes
        self._from = lanes.first_nonzero_from(nonzero)
        self._next = np.empty(lanes.count, dtype=np.int64)
        self._replies = [0] * lanes.num_slots
        self._open = lanes.num_slots

    @property
    def done(self) -> bool:
        """Whether all sums have been received."""
        return self._open == 0

    def start(self, first: int = 0) -> Iterator[Message]:
        """Yield the messages to begin with, one for each slot.

        Args:
            first: Slot to begin with; if each rank takes another, none gets all messages at once.
        """
        slots = self._lanes.num_slots
        for step in range(slots):
            slot = (first + step) % slots
            yield self._message(slot, self._lanes.first_blocks(slot))

    def answer(self, reply: Message) -> Message | None:
        """Return what to send in answer to a reply; None to stay silent.

        Args:
            reply: Of any slot; those of one slot in the order in which they were sent.
        """
        slot, inside = reply.slot, reply.nexts < self._lanes.num_blocks
        self._replies[slot] += 1
        if not inside.any():
            self._open -= 1
            return None
        own = self._next[reply.nexts % self._lanes.count] == reply.nexts
        blocks = reply.nexts[own & inside]
        if blocks.size == 0 and self._replies[slot] % self._lanes.answer_interval:
            return None
        return self._message(slot, blocks)

    def _message(self, slot: int, blocks: Index) -> Message:
        nexts = self._from[blocks + self._lanes.count]
        self._next[blocks % self._lanes.count] = nexts
        return Message(slot, MessageKind.UP, blocks, nexts)


class Aggregator:
    """Decides what a rank sums and sends down.

    Args:
        lanes: Of the bucket.
        rank: Whose slots.
    """

    def __init__(self, lanes: Lanes, rank: int) -> None:
        self._lanes = lanes
        self._slots = {
            slot: _Slot(lanes, slot) for slot in range(lanes.num_slots) if lanes.owner(slot) == rank
        }
        self._open = len(self._slots)

    @property
    def done(self) -> bool:
        """Whether all sums have been made: then no message will come for it any more."""
        return self._open == 0

    def receive(self, worker: int, message: Message) -> Reply | None:
        """Take in a message.

        Args:
            worker: Who sent it.
            message: Of one of this rank's slots.

        Returns:
            What follows, if it was the last one that was missing.
        """
        slot = self._slots[message.slot]
        columns = self._lanes.columns(message.blocks)
        slot.nexts[worker, columns] = message.nexts
        slot.sources[worker, columns] = np.arange(columns.size)
        slot.missing -= 1
        return None if slot.missing else self._reply(message.slot, slot)

    def _reply(self, number: int, slot: _Slot) -> Reply:
        lanes = self._lanes
        live = np.flatnonzero(slot.blocks < lanes.num_blocks)
        blocks, nexts = slot.blocks[live], slot.nexts[:, live].min(axis=0)
        assert (nexts > blocks).all(), "a block was sent whose turn it was not"
        reply = Reply(
            Message(number, MessageKind.DOWN, blocks, nexts),
            slot.sources[:, live],
            slot.answers == lanes.num_ranks,
        )
        slot.blocks[live] = nexts
        slot.sources.fill(-1)
        slot.replies += 1
        inside = live[nexts < lanes.num_blocks]
        if inside.size == 0:
            self._open -= 1
        elif slot.replies % lanes.answer_interval == 0:
            slot.missing = lanes.num_ranks
        else:
            # All lanes of a worker come in one message, so that messages can be counted.
            awaited = slot.nexts[:, inside] == slot.blocks[inside]
            slot.missing = int(awaited.any(axis=1).sum())
        slot.answers = slot.missing
        return reply


class _Slot:
    """An aggregator's state of a slot.

    Attributes:
        blocks: (m,): what is being summed in each lane, or beyond the bucket.
        nexts: (N, m): the last look-ahead of each worker.
        sources: (N, m): as in `Reply`.
        answers: Messages that answer the last reply.
        missing: Those that have not come yet.
        replies: Number of replies.
    """

    def __init__(self, lanes: Lanes, slot: int) -> None:
        self.blocks = lanes.first_blocks(slot)
        self.nexts = np.empty((lanes.num_ranks, self.blocks.size), dtype=np.int64)
        self.sources = np.full_like(self.nexts, -1)
        self.answers = self.missing = lanes.num_ranks
        self.replies = 0
