# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step a tensor as a whole, where ranks hold parts of it.

Adam steps each element by itself. Adafactor, Muon, SOAP and LAMB read rows, columns or norms, so
that a part of a matrix would not step as it does within the matrix. ZeRO's parts are flat, too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wavemare.engine.checkpoint.random_state import seeded
from wavemare.engine.config.resolve import SECTION
from wavemare.engine.experts import is_divided
from wavemare.engine.launch.group import gather
from wavemare.engine.optim.groups import is_made_anew
from wavemare.engine.optim.optimizers import is_added
from wavemare.engine.optim.policy import POLICY
from wavemare.engine.parts import split_weights
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_MATRIX, _EXPERTS = (4, 4), (4, 4, 4)
_STEPS = 4
_ZERO = "zero_optimization.stage"
_CHANGED = (MutableSequence, MutableMapping, MutableSet, tuple, Tensor)
"""Types of an optimizer's attributes that a step may change in place, or what they hold."""
_READS_WHOLE = "it reads whole tensors for a step"
_ONE_GROUP = "ZeRO would put its groups of weights into one"
_UNTRIED = "it could not be tried on parts of tensors"
_NEAR = 1e-3
"""Of the largest change of an element: how far parts may be off."""


def check_parts(engine: EngineMixin) -> None:
    """Refuse an optimizer that reads whole tensors, if ranks hold parts of those that it steps.

    So is one whose groups ZeRO does not keep. All ranks call it.

    Raises:
        ConfigError: A weight is a part of a layer that ranks split, or of experts, and the
            optimizer does not step parts as it steps whole tensors, or cannot be tried.
    """
    settings, own = engine.settings, _refused_key(engine)
    divides = max(settings.tensor_parallel.size, settings.expert_parallel.size) > 1
    divides = divides or _is_flat(engine)
    # Stages may have unlike parameter groups.
    found = [refused for refused in (gather(own) if divides else [own]) if refused]
    if not found:
        return
    key, name, reason = found[0]
    reason += ", and each rank holds a part of them"
    without = f"no wavemare.{key}" if key != _ZERO else '"zero_optimization": {"stage": 0}'
    remedy = f"Use AdamW, or another optimizer of single elements, or {without}"
    if settings.pipeline.pipemare.optimizer_policy == "auto":
        remedy = f'Set {POLICY} to "keep", and use AdamW, or {without}'
    raise ConfigError("optimizer", name, reason, remedy)


def _is_flat(engine: EngineMixin) -> bool:
    """Whether an engine of ours steps flat parts, by an optimizer that DeepSpeed does not know."""
    optimizer = getattr(engine, "basic_optimizer", None)
    known = type(optimizer).__module__.startswith("deepspeed.") or is_added(optimizer)
    return SECTION in engine.config and engine.zero_optimization_stage() > 0 and not known


def _refused_key(engine: EngineMixin) -> tuple[str, str, str] | None:
    """Return the key that gives ranks parts, the optimizer's name and the reason; None if right."""
    optimizer = getattr(engine, "basic_optimizer", None)
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    matrices = [(_MATRIX, 0), (_MATRIX, 1)], [p.requires_grad for p in split_weights(engine.module)]
    experts = [(_EXPERTS, 0)], [is_divided(p) and p.ndim == len(_EXPERTS) for p in trained]
    for key, (ways, found) in (("tensor_parallel", matrices), ("expert_parallel", experts)):
        if optimizer is None or not any(found):
            continue
        reasons = [reason for way in ways if (reason := refusal_of_parts(optimizer, *way))]
        if reasons:
            return key, type(optimizer).__name__, reasons[0]
    if optimizer is not None and _is_flat(engine):
        if is_made_anew(engine.optimizer, optimizer) and len(optimizer.param_groups) > 1:
            return _ZERO, type(optimizer).__name__, _ONE_GROUP
        if refusal_of_parts(optimizer, _MATRIX, None) == _READS_WHOLE:
            return _ZERO, type(optimizer).__name__, _READS_WHOLE
    return None


def refusal_of_parts(optimizer: Any, shape: tuple[int, ...], side: int | None) -> str:
    """Return why an optimizer must not step halves of tensors; empty if it steps them as whole.

    It is tried with each of its parameter groups, on tensors of its own.

    Args:
        optimizer: Stays as it is.
        shape: Of the tensor.
        side: On which it is cut; None if it is flat before.
    """
    if type(optimizer).__module__.startswith("deepspeed.ops."):  # compiled, for its own tensors
        return _READS_WHOLE if "lamb" in type(optimizer).__name__.lower() else ""
    with seeded(0):
        numbers = torch.randn(1 + _STEPS, *shape)
    held = (p for group in optimizer.param_groups for p in group["params"] if not p.is_meta)
    before, *gradients = numbers.to(next((p.device for p in held), numbers.device))
    for group in optimizer.param_groups:
        rate = {} if group.get("lr") is None else {"lr": 0.01}  # that of a warm-up may be 0
        options = {**group, **rate}
        try:
            whole = _stepped(optimizer, options, before, gradients)
            halves = [
                _stepped(optimizer, options, *_half(number, side, before, gradients))
                for number in (0, 1)
            ]
        except Exception as error:
            return f"{_UNTRIED} ({type(error).__name__}: {error})"
        change = (whole - before).abs().max()
        if not change:  # it steps others than its own groups say
            return _UNTRIED
        together = torch.cat(halves, side or 0).view_as(whole)
        if (together - whole).abs().max() > _NEAR * change:
            return _READS_WHOLE
    return ""


def _half(
    number: int, side: int | None, before: Tensor, gradients: Iterable[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    if side is None:
        return _half(number, 0, before.flatten(), [each.flatten() for each in gradients])
    return before.chunk(2, side)[number], [each.chunk(2, side)[number] for each in gradients]


def _stepped(
    optimizer: Any, options: dict[str, Any], before: Tensor, gradients: Iterable[Tensor]
) -> Tensor:
    """Return what a copy of an optimizer makes of a tensor."""
    try:
        return _stepped_by(_emptied, optimizer, options, before, gradients)
    except Exception:  # its constructor makes the state of each weight
        return _stepped_by(_made_anew, optimizer, options, before, gradients)


def _stepped_by(
    copy: Callable[[Any, dict[str, Any]], Any],
    optimizer: Any,
    options: dict[str, Any],
    before: Tensor,
    gradients: Iterable[Tensor],
) -> Tensor:
    weight = nn.Parameter(before.clone())
    own = copy(optimizer, {**options, "params": [weight]})
    with torch.enable_grad():
        for gradient in gradients:
            weight.grad = gradient.clone()
            type(own).step(own)
    return weight.detach()


def _made_anew(optimizer: Any, group: dict[str, Any]) -> Any:
    """Return an optimizer of the same kind and one parameter group."""
    known = signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer)([group], **defaults)


def _emptied(optimizer: Any, group: dict[str, Any]) -> Any:
    """Return a copy with one parameter group, no state, and containers of its own."""
    own = object.__new__(type(optimizer))
    weights = {id(p): p for each in optimizer.param_groups for p in each["params"]}
    held = {
        name: copy.deepcopy(value, weights.copy()) if isinstance(value, _CHANGED) else value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups") and not name.endswith("_hooks")
    }
    hooks: dict[str, Any] = {
        name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")
    }
    vars(own).update({**held, **hooks})
    own.state, own.param_groups = defaultdict(dict), [group]
    return own
