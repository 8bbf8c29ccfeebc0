# SPDX-License-Identifier: Apache-2.0
"""A weight that several segments use: its gradients are added up before they meet the others.

Autograd adds a weight's gradients of one backward pass up, and then adds the sum to ``.grad``. To
do the same over segments that go backward one by one, all but the first segment that uses a weight
are lent a leaf of the same memory; its gradient joins that of the first segment's backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Loans", "joining", "lent"]

Loans = dict[nn.Parameter, nn.Parameter]
"""For each weight the leaf of the same memory that stands for it."""


@contextmanager
def lent(module: nn.Module, weights: Sequence[nn.Parameter], loans: Loans) -> Iterator[None]:
    """Let all parts of a module use leaves in place of weights.

    Args:
        module: Owns the weights.
        weights: Those that are lent.
        loans: Takes the leaves; those that it has are used again.
    """
    with ExitStack() as stack:
        for weight in weights:
            for part in module.modules():
                for name, held in part._parameters.items():
                    if held is weight:
                        lend = _lend_gathered if hasattr(weight, "ds_id") else _lend
                        stack.enter_context(lend(part, name, weight, loans))
        yield


@contextmanager
def _lend(part: nn.Module, name: str, weight: nn.Parameter, loans: Loans) -> Iterator[None]:
    if weight not in loans:
        loans[weight] = nn.Parameter(weight.detach())
    part._parameters[name] = loans[weight]
    try:
        yield
    finally:
        part._parameters[name] = weight


@contextmanager
def _lend_gathered(
    part: nn.Module, name: str, weight: nn.Parameter, loans: Loans
) -> Iterator[None]:
    """Lend a weight of ZeRO-3, which is there only while its module runs."""

    def begin(*_: Any) -> None:
        loans[weight] = nn.Parameter(weight.detach())
        part._parameters[name] = loans[weight]

    def end(*_: Any) -> None:
        part._parameters[name] = weight

    # Ours stand within DeepSpeed's: after it has gathered, and before it gives back.
    hooks = [
        part.register_forward_pre_hook(begin),
        part.register_forward_hook(end, prepend=True, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def joining(gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Add gradients of lent weights to those of the backward pass within."""
    hooks = [
        weight.register_hook(lambda own, lent=gradient: lent + own)
        for weight, gradient in gradients.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
