"""Micro-batches of one rank that is ahead of the others: from which iterator, and in what order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Feed"]


class Feed:
    """Reads the training iterators that a caller gives, one after the other.

    The first stage reads ahead: when the caller changes to another iterator, micro-batches of the
    one before are still on their way. Each is stamped with its iterator's number, so that the last
    stage takes its labels from the same one.

    Args:
        read: Reads and prepares the next batch of an iterator; raises StopIteration at its end.
    """

    def __init__(self, read: Callable[[Iterator[Any]], Any]) -> None:
        self._read = read
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
        """Read from an iterator from now on; the same one again, or none, changes nothing.

        What was given back of the one before is dropped: it was read too early, and a caller who
        counts what has been trained on does not know of it.
        """
        if iterator is not None and iterator is not self._iterators.get(self.newest):
            self._iterators[self.newest + 1] = iterator
            self._put_back.clear()

    def next_inputs(self) -> tuple[int, Any] | None:
        """Return the next batch and its iterator's number; None if the data ended."""
        if self._put_back:
            return self._put_back.popleft()
        number = self.newest
        try:
            return number, self._read(self._iterators[number])
        except StopIteration:
            self._ended = number
            return None

    def next_labels(self, number: int) -> Any:
        """Return the next batch of an iterator; those before it are let go.

        Raises:
            StopIteration: It ended.
        """
        for older in [n for n in self._iterators if n < number]:
            del self._iterators[older]
        return self._read(self._iterators[number])

    def put_back(self, batches: list[tuple[int, Any]]) -> None:
        """Give batches back, in their order, to be the next ones."""
        self._put_back.extendleft(reversed(batches))
