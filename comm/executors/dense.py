# SPDX-License-Identifier: Apache-2.0
"""Dense sums, by the library's reduction or in rank order, of buckets or of packed unions."""

from __future__ import annotations

from dataclasses import replace

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, Executor
from wavemare.comm.executors.ranges import reduce_and_gather

__all__ = ["Dense", "Ordered", "Packed"]


class Dense(Executor):
    """The library's reduction: MPI_Allreduce, gloo's or NCCL's."""

    name = "dense"
    needs_masks = False
    deterministic = False

    def all_reduce(self, call: CollectiveCall, masks: Masks | None = None) -> None:
        """Sum by the library; types that it does not support, by `Ordered`."""
        if not call.transport.reduces(call.flat.dtype):
            Ordered().all_reduce(call)
            return
        with call.phase("dense"):
            call.transport.all_reduce(call.flat)
            if call.scale != 1:
                call.flat.mul_(call.scale)


class Ordered(Executor):
    """Every rank sums a range of the bucket in rank order.

    It sends 2 (N-1)/N of the bucket, as few bytes as any dense reduction. The network only moves
    bytes, so any type works.
    """

    name = "ordered"
    needs_masks = False

    def all_reduce(self, call: CollectiveCall, masks: Masks | None = None) -> None:
        """Push ranges to their owners, sum, and pull the sums."""
        reduce_and_gather(call)


class Packed(Executor):
    """Sums the packed union of all ranks' blocks by `Dense`.

    Best where all ranks have the same blocks, and on networks whose reduction is the fastest.
    """

    name = "packed"
    deterministic = False

    def all_reduce(self, call: CollectiveCall, masks: Masks | None) -> None:
        """Pack the union, reduce it, and put it back."""
        assert masks is not None
        with call.phase("pack"):
            index = call.index(masks.union)
            packed = call.packed("packed", index.numel())
            call.kernels.gather(call.flat, call.block, index, packed)
        if packed.numel():
            Dense().all_reduce(replace(call, flat=packed))
        with call.phase("unpack"):
            call.kernels.scatter(packed, call.block, index, call.flat)
