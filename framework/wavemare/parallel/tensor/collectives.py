# SPDX-License-Identifier: Apache-2.0
"""Sums over a group of ranks as functions that autograd knows (Shoeybi et al. 2019, section 3).

Tensors are summed in their own type: gloo and NCCL both add bfloat16 and float16, and round after
each addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = [
    "copy_to_group",
    "deferred_sums",
    "gather_from_group",
    "reduce_from_group",
    "sums_deferred",
]

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextmanager
def deferred_sums() -> Iterator[None]:
    """Leave the sums of a forward pass, and of the backward pass through it, to the caller.

    Outputs of row-parallel layers and of the embedding, and gradients of the inputs of
    column-parallel ones, are then this rank's part of a sum.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def sums_deferred() -> bool:
    """Whether a :func:`deferred_sums` is open."""
    return _deferred.get()


def copy_to_group(value: Tensor, group: Any) -> Tensor:
    """Return a tensor, equal on all ranks, that each uses in its own way: its gradients add up.

    Identity in the forward pass, all-reduce in the backward pass (Megatron-LM's f).
    """
    return value if _deferred.get() else _CopyToGroup.apply(value, group)


def reduce_from_group(value: Tensor, group: Any) -> Tensor:
    """Return the sum over the ranks, which all go on with in the same way.

    All-reduce in the forward pass, identity in the backward pass (Megatron-LM's g).
    """
    return value if _deferred.get() else _ReduceFromGroup.apply(value, group)


def gather_from_group(value: Tensor, group: Any) -> Tensor:
    """Return the ranks' tensors side by side in the last dimension.

    All ranks must go on in the same way: in the backward pass each takes its part of the gradient.
    """
    return _GatherFromGroup.apply(value, group)


def _summed(value: Tensor, group: Any) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return _summed(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.width = dist.get_rank(group), value.shape[-1]
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value, group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(-1, ctx.rank * ctx.width, ctx.width), None
