# SPDX-License-Identifier: Apache-2.0
"""Every rank gathers the non-zero blocks of all ranks and sums them itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from wavemare.comm.blocks.layout import BlockLayout, gathered
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall


def block_allgather(call: CollectiveCall, masks: Masks) -> None:
    """Gather all blocks on each rank, and sum the union.

    Sends (N-1) d of the bucket and holds N d: for two ranks, tiny buckets, disjoint masks.
    """
    with call.phase("plan"):
        layout = gathered(masks)
    summed = call.packed("summed", layout.blocks.size)
    gather_and_sum(call, masks, masks.of_rank(call.rank), layout, summed)
    with call.phase("unpack"):
        call.kernels.scatter(summed, call.block, call.index(layout.blocks), call.flat)


def gather_and_sum(
    call: CollectiveCall, masks: Masks, own: npt.NDArray[np.int64], layout: BlockLayout, out: Tensor
) -> None:
    """Send this rank's blocks to all ranks, and sum the blocks of all ranks.

    Args:
        call: The call; its bucket is only read.
        masks: Of all ranks.
        own: (k,), the numbers of this rank's blocks in its bucket, ascending.
        layout: From `gathered`.
        out: (U * block,), written: the scaled sums, ascending by block.
    """
    with call.phase("pack"):
        received = call.packed("received", int(masks.counts.sum()))
        parts = received.split((masks.counts * call.block).tolist())
        call.kernels.gather(call.flat, call.block, call.index(own), parts[call.rank])
    with call.phase("push"):
        call.transport.all_gather_parts(parts)
    with call.phase("plan"):
        sources = call.index(layout.sources(0))
    with call.phase("reduce"):
        call.kernels.reduce(received, sources, call.block, call.scale, out)
