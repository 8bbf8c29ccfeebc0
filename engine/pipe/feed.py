# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a rank that reads ahead: their iterators and their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wavemare.errors import DataError

__all__ = ["Feed"]


class Feed:
    """Reads the training iterators that a caller gives, one after the other.

    The first stage reads ahead: when the caller changes to another iterator, micro-batches of the
    one before are still on their way. Each is stamped with its iterator's number, so that the last
    stage takes its labels from the same one.

    Args:
        read: Reads and prepares the next batch of an iterator; raises StopIteration at its end.
        keeps_older: Whether older iterators are still read from: on the last stage.
    """

    def __init__(self, read: Callable[[Iterator[Any]], Any], *, keeps_older: bool = True) -> None:
        self._read = read
        self._keeps_older = keeps_older
        self._iterators: dict[int, Iterator[Any]] = {}
        self._put_back: deque[tuple[int, Any]] = deque()
        self._ended: int | None = None

    @property
    def newest(self) -> int:
        """Number of the iterator given last; 0 before the first."""
        return max(self._iterators, default=0)

    @property
    def goes_on(self) -> bool:
        """Whether an iterator has been given since one ended."""
        return self._ended is None or self._ended < self.newest

    def use(self, iterator: Iterator[Any] | None) -> None:
        """Read from an iterator from now on; the same one again, or none, changes nothing."""
        newest = self.newest
        if iterator is None or iterator is self._iterators.get(newest):
            return
        if not self._keeps_older:
            self._iterators.clear()
        self._iterators[newest + 1] = iterator

    def next_inputs(self) -> tuple[int, Any] | None:
        """Return the next batch and its iterator's number; None if the data ended.

        Raises:
            DataError: There has been no iterator.
        """
        if self._put_back:
            return self._put_back.popleft()
        number = self.newest
        if not number:
            reason = "there is no iterator, and initialize had no training_data"
            raise DataError("data_iter", None, reason, "Give train_batch an iterator")
        try:
            return number, self._read(self._iterators[number])
        except StopIteration:
            self._ended = number
            return None

    def next_labels(self, number: int) -> Any:
        """Return the next batch of an iterator; those before it are let go.

        Raises:
            DataError: The iterator has ended, or there has been none of this number.
        """
        for older in [n for n in self._iterators if n < number]:
            del self._iterators[older]
        if number in self._iterators:
            try:
                return self._read(self._iterators[number])
            except StopIteration:
                pass
        raise DataError(
            "data_iter",
            f"iterator {number}",
            "the last stage has fewer micro-batches than the first stage read",
            "Give the first and last stage iterators over the same data",
        )

    def drop_put_back(self) -> list[int]:
        """Forget what was given back; return the iterator's number of each batch."""
        dropped = [number for number, _ in self._put_back]
        self._put_back.clear()
        return dropped

    def skip(self, numbers: Iterable[int]) -> None:
        """Pass over a batch of each of these iterators, as the first stage has done."""
        for number in numbers:
            self.next_labels(number)

    def put_back(self, batches: list[tuple[int, Any]]) -> None:
        """Give batches back, in their order, to be the next ones."""
        self._put_back.extendleft(reversed(batches))
