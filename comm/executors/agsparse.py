# SPDX-License-Identifier: Apache-2.0
"""All ranks gather all non-zero elements, with an index for each.

DeepSpeed and PyTorch gather sparse gradients in the same way, but with an index for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors.base import CollectiveCall, Executor
from wavemare.comm.executors.pairs import nonzero_ids
from wavemare.comm.kernels.words import sum_dtype

__all__ = ["AGsparse"]


class AGsparse(Executor):
    """(N-1) d of the bucket, plus an index for each value; d is the density of elements.

    It is there to be compared with. The ranks' values are added in the order of the ranks, which
    makes of it the ordered sum: an element that is left out is zero, and adding that to a sum that
    began with +0.0 changes nothing.
    """

    name = "agsparse"
    needs_masks = False

    def all_reduce(self, call: CollectiveCall, masks: Masks | None = None) -> None:
        """Exchange sizes, then indices and values, and sum."""
        flat = call.flat
        with call.phase("pack"):
            own_ids = nonzero_ids(flat)
            own_values = flat[own_ids]
        with call.phase("metadata"):
            counts = _exchange_counts(call, own_ids.numel())
        with call.phase("push"):
            ids = _gather_parts(call, "ids", own_ids, counts)
            values = _gather_parts(call, "values", own_values, counts)
        with call.phase("reduce"):
            wide = sum_dtype(flat.dtype)
            sums = flat
            if wide != flat.dtype:
                sums = call.scratch("sums", flat.numel(), flat.new_empty(0, dtype=wide))
            sums.zero_()
            for rank in range(call.size):
                sums.index_add_(0, ids[rank], values[rank].to(wide))
            if call.scale != 1:
                sums.mul_(call.scale)
            if sums is not flat:
                flat.copy_(sums)


def _exchange_counts(call: CollectiveCall, own: int) -> list[int]:
    mine = torch.tensor([own], dtype=torch.int64, device=call.transport.message_device)
    table = mine.new_empty(call.size, 1)
    call.transport.all_gather(mine, table)
    return [int(count) for count in table.view(-1).tolist()]


def _gather_parts(call: CollectiveCall, name: str, own: Tensor, counts: list[int]) -> list[Tensor]:
    gathered = call.scratch(name, sum(counts), own)
    parts = list(gathered.split(counts))
    parts[call.rank].copy_(own)
    call.transport.all_gather_parts(parts)
    return parts
