# SPDX-License-Identifier: Apache-2.0
"""A gather of ranges; where all ranks have held them alike, only blocks that have changed travel.

ZeRO 1 and 2 gather the weights that an optimizer step has updated. An optimizer that leaves the
rows of a table alone whose gradients are zero changes few of them. Each owner compares its range
with a copy from before the step, so the result has the bits of a gather of everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from wavemare.comm.collective_queue import Finish
from wavemare.comm.executors import CollectiveCall, gather_ranges
from wavemare.comm.kernels import num_blocks
from wavemare.comm.masks import Masks, begin_masks, mask_bytes

_BLOCK_BYTES = 64
"""Small, so that blocks that reach beyond a row cost little. A mask has 1/512 of the bytes."""
_MOST = 0.75
"""Of the bytes: if more have changed, everything is sent, without copies."""


def gather_changes(call: CollectiveCall, before: Tensor | None) -> Finish:
    """Exchange the masks of the changed blocks; the result sends these blocks.

    Args:
        call: Has the tensor, and one range of each rank, in their order.
        before: This rank's range as all ranks hold it; None to send everything, of any ranges.
    """
    if before is None:
        call.stats.executor = "dense"
        return partial(gather_ranges, call)
    flat = call.flat
    block = _BLOCK_BYTES // flat.element_size()
    assert call.ranges is not None
    ranges = [flat[start:stop] for start, stop, _ in call.ranges.tolist()]
    most = max(num_blocks(part.numel(), block) for part in ranges)
    bits = torch.zeros(mask_bytes(most), dtype=torch.uint8, device=flat.device)
    if before.numel():
        with call.phase("mask"):
            difference, words = _difference(ranges[call.rank], before)
            own = bits[: mask_bytes(num_blocks(before.numel(), block))]
            call.kernels.mask(difference, block * words, own)
    with call.phase("metadata"):
        masks = begin_masks(call.transport, bits, most)()
    if int(masks.counts.sum()) * block > _MOST * flat.numel():
        call.stats.executor = "dense"
        return partial(gather_ranges, call)
    call.stats.executor = "changes"
    return partial(_send, call, ranges, masks, block)


def _difference(now: Tensor, before: Tensor) -> tuple[Tensor, int]:
    """Return what is not zero where two tensors differ in any bit, int32; and words per element."""
    if now.element_size() == 2:  # noqa: PLR2004
        return (now.view(torch.int16) ^ before.view(torch.int16)).int(), 1
    return now.view(torch.int32) ^ before.view(torch.int32), now.element_size() // 4


def _send(call: CollectiveCall, ranges: Sequence[Tensor], masks: Masks, block: int) -> None:
    counts = masks.counts * block
    parts = call.scratch("changes", int(counts.sum()), call.flat).split(counts.tolist())
    rank, kernels = call.rank, call.kernels
    with call.phase("pack"):
        kernels.gather(ranges[rank], block, call.index(masks.of_rank(rank)), parts[rank])
    with call.phase("pull"):
        call.transport.all_gather_parts(parts)
    with call.phase("unpack"):
        for peer in call.transport.peers():
            kernels.scatter(parts[peer], block, call.index(masks.of_rank(peer)), ranges[peer])
