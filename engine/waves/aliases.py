# SPDX-License-Identifier: Apache-2.0
"""Weights that several segments share: their gradients add up as without segments.

Autograd adds a weight's gradients of one backward pass up and then adds the sum to ``.grad``.
Segments go backward one by one. So all but the first segment that uses a weight get an alias, a
leaf of the same memory. The alias's gradient joins the backward pass of the first segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Aliases", "adding_gradients", "aliased"]

Aliases = dict[nn.Parameter, nn.Parameter]
"""For each shared weight its alias, a leaf of the same memory."""


@contextmanager
def aliased(module: nn.Module, weights: Sequence[nn.Parameter], aliases: Aliases) -> Iterator[None]:
    """Replace weights by aliases in all parts of a module.

    Args:
        module: Owns the weights.
        weights: The shared weights.
        aliases: Filled in; aliases that it contains are used again.
    """
    with ExitStack() as stack:
        for weight in weights:
            for part in module.modules():
                for name, held in part._parameters.items():
                    if held is weight:
                        alias = _alias_gathered if hasattr(weight, "ds_id") else _alias
                        stack.enter_context(alias(part, name, weight, aliases))
        yield


@contextmanager
def _alias(part: nn.Module, name: str, weight: nn.Parameter, aliases: Aliases) -> Iterator[None]:
    if weight not in aliases:
        aliases[weight] = nn.Parameter(weight.detach())
    part._parameters[name] = aliases[weight]
    try:
        yield
    finally:
        part._parameters[name] = weight


@contextmanager
def _alias_gathered(
    part: nn.Module, name: str, weight: nn.Parameter, aliases: Aliases
) -> Iterator[None]:
    """Alias a weight of ZeRO-3, which is gathered only while its module runs."""

    def begin(*_: Any) -> None:
        aliases[weight] = nn.Parameter(weight.detach())
        part._parameters[name] = aliases[weight]

    def end(*_: Any) -> None:
        part._parameters[name] = weight

    # Run within DeepSpeed's hooks: after the gather, before the release.
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
def adding_gradients(gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Add gradients of aliases to the gradients of the backward pass inside."""
    hooks = [
        weight.register_hook(lambda own, other=gradient: other + own)
        for weight, gradient in gradients.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
