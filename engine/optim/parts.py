# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step a tensor as a whole, where ranks hold parts of it.

Adam steps each element by itself. Adafactor, Muon, SOAP and LAMB read rows, columns or norms, so
that a part of a matrix would not step as it does within the matrix.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wavemare.engine.checkpoint.random_state import seeded
from wavemare.engine.experts import is_divided
from wavemare.engine.optim.policy import POLICY
from wavemare.engine.parts import split_weights
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_MATRIX, _EXPERTS = (4, 4), (4, 4, 4)
_STEPS = 4
_NEAR = 1e-3
"""Of the largest change of an element: how far parts may be off."""


def check_parts(engine: EngineMixin) -> None:
    """Refuse an optimizer that reads whole tensors, if ranks hold parts of those that it steps.

    Raises:
        ConfigError: A weight is a part of a layer that ranks split, or of experts.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    matrices = [(_MATRIX, 0), (_MATRIX, 1)], [p.requires_grad for p in split_weights(engine.module)]
    experts = [(_EXPERTS, 0)], [is_divided(p) and p.ndim == len(_EXPERTS) for p in trained]
    for key, (ways, found) in (("tensor_parallel", matrices), ("expert_parallel", experts)):
        if optimizer is None or not any(found):
            continue
        if not all(steps_parts(optimizer, shape, side) for shape, side in ways):
            name = type(optimizer).__name__
            reason = "it reads whole tensors for a step, and each rank holds a part of them"
            remedy = f"Use AdamW, or another optimizer of single elements, or no wavemare.{key}"
            if engine.settings.pipeline.pipemare.optimizer_policy == "auto":
                remedy = f'Set {POLICY} to "keep", and use AdamW, or no wavemare.{key}'
            raise ConfigError("optimizer", name, reason, remedy)


def steps_parts(optimizer: Any, shape: tuple[int, ...], side: int) -> bool:
    """Return whether an optimizer steps two halves of a tensor as it steps the whole one.

    It is tried with each of its parameter groups, on tensors of its own. An optimizer that cannot
    be tried is taken to do so.

    Args:
        optimizer: Stays as it is.
        shape: Of the tensor.
        side: On which it is cut.
    """
    if type(optimizer).__module__.startswith("deepspeed.ops."):  # compiled, for its own tensors
        return "lamb" not in type(optimizer).__name__.lower()
    with seeded(0):
        before, *gradients = torch.randn(1 + _STEPS, *shape)
    for group in optimizer.param_groups:
        rate = {} if group.get("lr") is None else {"lr": 0.01}  # that of a warm-up may be 0
        options = {**group, **rate}
        try:
            whole = _stepped(optimizer, options, before, gradients)
            halves = [
                _stepped(optimizer, options, *_half(number, side, before, gradients))
                for number in (0, 1)
            ]
        except Exception:
            continue
        change = (whole - before).abs().max()
        if (torch.cat(halves, side) - whole).abs().max() > _NEAR * change:
            return False
    return True


def _half(
    number: int, side: int, before: Tensor, gradients: Iterable[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    return before.chunk(2, side)[number], [each.chunk(2, side)[number] for each in gradients]


def _stepped(
    optimizer: Any, options: dict[str, Any], before: Tensor, gradients: Iterable[Tensor]
) -> Tensor:
    """Return what a copy of an optimizer makes of a tensor."""
    weight = nn.Parameter(before.clone())
    own = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {
        name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")
    }
    vars(own).update({**vars(optimizer), **hooks})
    own.state, own.param_groups = defaultdict(dict), [{**options, "params": [weight]}]
    with torch.enable_grad():
        for gradient in gradients:
            weight.grad = gradient.clone()
            type(own).step(own)
    return weight.detach()
