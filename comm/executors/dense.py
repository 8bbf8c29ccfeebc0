# SPDX-License-Identifier: Apache-2.0
"""Sums by the library's reduction, of buckets or of packed unions."""

from __future__ import annotations

from dataclasses import replace

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall
from wavemare.comm.executors.ranges import reduce_and_gather


def dense(call: CollectiveCall, masks: Masks | None = None) -> None:
    """Sum by MPI_Allreduce, gloo or NCCL; types that these do not support, in rank order."""
    if not call.transport.reduces(call.flat.dtype):
        reduce_and_gather(call)
        return
    with call.phase("dense"):
        call.transport.all_reduce(call.flat)
        if call.scale != 1:
            call.flat.mul_(call.scale)


def packed(call: CollectiveCall, masks: Masks) -> None:
    """Pack the union of all ranks' blocks, sum it by `dense`, and put it back.

    Best where all ranks have the same blocks, and on networks whose reduction is the fastest.
    """
    with call.phase("pack"):
        index = call.index(masks.union)
        blocks = call.packed("packed", index.numel())
        call.kernels.gather(call.flat, call.block, index, blocks)
    if blocks.numel():
        dense(replace(call, flat=blocks))
    with call.phase("unpack"):
        call.kernels.scatter(blocks, call.block, index, call.flat)
