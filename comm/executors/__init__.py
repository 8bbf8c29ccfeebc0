# SPDX-License-Identifier: Apache-2.0
"""Ways to sum a bucket over all ranks.

In: a bucket and the masks of all ranks. Out: the sum, in the bucket. Read `base.py` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from wavemare.comm.executors.base import CollectiveCall, Scratch
from wavemare.comm.executors.block_allgather import block_allgather
from wavemare.comm.executors.push_pull import push_pull
from wavemare.comm.executors.ranges import (
    dense,
    packed,
    reduce_and_gather,
    reduce_ranges,
    reduce_scatter,
)

__all__ = ["EXECUTORS_BY_MODE", "CollectiveCall", "Executor", "Scratch"]


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
