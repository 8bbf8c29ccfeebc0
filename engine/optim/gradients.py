# SPDX-License-Identifier: Apache-2.0
"""Gradients of parameters, and the sum of their squares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def is_tied_copy(parameter: Any) -> bool:
    """Whether a weight is a copy of one on another stage, where it counts for the norm."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def squared_norm(tensors: Iterable[Tensor], device: Any) -> Tensor:
    """Return the sum of the squares of all elements: (), fp64, on a device.

    Each tensor's norm is computed in fp32, or in its own type if that is larger: a norm in fp16
    would overflow at 65,504. Above 1.8e19 it is not finite.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_type.setdefault(tensor.dtype, []).append(tensor.detach())
    for dtype, alike in by_type.items():
        norms = torch._foreach_norm(alike, 2, torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum().to(device)
    return total


def gradient_values(parameters: Iterable[Any]) -> list[Tensor]:
    """Return the gradients of those parameters that have one.

    Sparse gradients are coalesced in place, so that each row counts once; their values are
    returned.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    grads = (parameter.grad for parameter in held)
    return [grad._values() if grad.is_sparse else grad for grad in grads]
