# SPDX-License-Identifier: Apache-2.0
"""Push, sum and pull in chunks: while one chunk is summed, others travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Begin", "num_chunks", "pipelined"]

Begin = Callable[[], Callable[[], None]]
"""Starts messages; returns a function that waits for them and uses them."""

_CHUNK_BYTES = 4 << 20
_MOST_CHUNKS = 8


def num_chunks(num_bytes: float) -> int:
    """Return the number of chunks of an owner's sums; the same on all ranks.

    Args:
        num_bytes: Bytes of one owner's sums.
    """
    return int(min(max(num_bytes // _CHUNK_BYTES, 1), _MOST_CHUNKS))


def pipelined(first: Sequence[Begin], second: Sequence[Begin]) -> None:
    """Start the first round of all chunks, and each chunk's second round when its first ends.

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
