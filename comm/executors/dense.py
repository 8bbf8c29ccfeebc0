# SPDX-License-Identifier: Apache-2.0
"""Everything is sent: by the library's own reduction, or summed in the order of the ranks."""

from __future__ import annotations

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import Call, Executor
from wavemare.comm.executors.ranges import reduce_and_gather

__all__ = ["Dense", "Ordered"]


class Dense(Executor):
    """The library's own reduction: MPI_Allreduce, gloo's or NCCL's."""

    name = "dense"
    needs_masks = False
    deterministic = False

    def all_reduce(self, call: Call, masks: Masks | None = None) -> None:
        """Sum by the library; types that it cannot sum as they should be, as `Ordered`."""
        if not call.transport.reduces(call.flat.dtype):
            Ordered().all_reduce(call)
            return
        with call.phase("dense"):
            call.transport.all_reduce(call.flat)
            if call.scale != 1:
                call.flat.mul_(call.scale)


class Ordered(Executor):
    """Every rank sums a range of the bucket in the order of the ranks.

    It sends as few bytes as any dense reduction, 2 (N-1)/N of the bucket, and copies nothing but
    what it receives. It only moves bytes, so that any network can sum any type with it.
    """

    name = "ordered"
    needs_masks = False

    def all_reduce(self, call: Call, masks: Masks | None = None) -> None:
        """Push ranges to their owners, sum, and pull the sums."""
        reduce_and_gather(call)
