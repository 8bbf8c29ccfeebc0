# SPDX-License-Identifier: Apache-2.0
"""Parallax (EuroSys'19): parameter servers for sparse variables, all-reduce for dense ones.

Every rank is also the server of a range of each sparse variable's rows, as its servers share hosts
with its workers. A worker pushes the rows of its gradient, and pulls the sums of all rows. In the
paper it pulls the variable's rows of its next batch; here the optimizer runs on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.sparse.peers.base import sum_at_ranges
from wavemare.comm.transport import Transport


def parallax(table: Tensor, blocks: Tensor, transport: Transport) -> None:
    """Sum one sparse variable, whose rows are the blocks: sends (N-1)/N (d + u) of it."""
    ids, sums = sum_at_ranges(transport, (blocks, table[blocks]), len(table))
    table[ids] = sums


def average_gradients(model: nn.Module, transport: Transport) -> None:
    """Average all gradients of a model over all ranks; sparse ones stay sparse."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    bucket = torch.cat([gradient.flatten() for gradient in dense])
    transport.all_reduce(bucket)
    for gradient, part in zip(dense, bucket.split([g.numel() for g in dense]), strict=True):
        gradient.copy_(part.view_as(gradient)).div_(transport.size)
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            own = parameter.grad.coalesce()
            pairs = own.indices()[0].contiguous(), own.values().contiguous()
            ids, rows = sum_at_ranges(transport, pairs, len(parameter))
            shape = parameter.shape
            parameter.grad = torch.sparse_coo_tensor(ids[None], rows / transport.size, shape)
