# SPDX-License-Identifier: Apache-2.0
"""Two rounds of messages with a sum between them, in chunks: while one is summed, others travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Begin", "num_chunks", "pipelined"]

Begin = Callable[[], Callable[[], None]]
"""Starts messages; what it returns waits for them and does what is to be done then."""

_CHUNK_BYTES = 4 << 20
_MOST_CHUNKS = 8


def num_chunks(num_bytes: float) -> int:
    """Return into how many chunks to cut what an owner gets, the same on all ranks.

    Args:
        num_bytes: Of the sums of one owner: what all ranks know.
    """
    return int(min(max(num_bytes // _CHUNK_BYTES, 1), _MOST_CHUNKS))


def pipelined(first: Sequence[Begin], second: Sequence[Begin]) -> None:
    """Start all first rounds, and the second round of each chunk when its first has ended.

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
