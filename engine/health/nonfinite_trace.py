# SPDX-License-Identifier: Apache-2.0
"""Which module made a number that is not finite: a second pass with every module watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wavemare.engine.checkpoint.random_state import random_state, restore_random_state

_NO_LABEL = -100
_NO_LABELS = "all labels are -100, and a mean over none is no number"

What = Literal["activation", "loss", "gradient"]


@dataclass(frozen=True)
class Finding:
    """The first number in a pass that is not finite.

    Args:
        what: Where it stood.
        module: Name of the module that made it.
        detail: More of where, for a message; may be empty.
        remedy: For the message.
    """

    what: What
    module: str
    detail: str = ""
    remedy: str = "Lower the learning rate, or fix the data or that module"


def tensors_of(value: Any, *, floating: bool = True) -> Iterator[Tensor]:
    """Yield the floating-point tensors in what a module takes or returns, or the other ones."""
    if isinstance(value, Tensor):
        if value.is_floating_point() == floating:
            yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item, floating=floating)


def loss_of(output: Any) -> Tensor | None:
    """Return a model's loss, if its output has one: the output, ``.loss`` or the first of it."""
    if not isinstance(output, Tensor) and hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad else None


def explained(found: Finding | None, batch: Any) -> Finding | None:
    """Return a finding, with its cause if it is a loss of labels of which none counts."""
    if found is None or found.what != "loss":
        return found
    for given in tensors_of(batch, floating=False):
        # The first of each sequence counts for nothing where labels are shifted.
        if given.numel() and bool((given[..., given.ndim > 1 :] == _NO_LABEL).all()):
            return replace(found, detail=_NO_LABELS, remedy="Give such micro-batches labels")
    return found


def trace(
    module: nn.Module,
    run: Callable[[], Any],
    roots: Callable[[Any], Sequence[Tensor]],
    *,
    together: bool = False,
) -> Finding | None:
    """Run a forward pass, and a backward pass if that is finite, and watch every module.

    Weights, their gradients, buffers and random numbers stay as they are.

    Args:
        module: Whose modules are watched.
        run: Calls it; what it returns is given to ``roots``.
        roots: Returns the scalars that gradients are taken of.
        together: Whether passes meet other ranks in collectives: the backward pass is done then
            whatever the forward pass has found.

    Returns:
        The first number found that is not finite; None if all are.
    """
    watch = _Watch(module)
    with _undisturbed(module), torch.enable_grad(), watch.hooks():
        tensors = roots(run())
        if watch.found is None and not all(map(_is_finite, tensors)):
            watch.found = Finding("loss", watch.name_of(module), "in the loss function")
        wanted = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.numel()]
        if not tensors or not wanted or (watch.found is not None and not together):
            return watch.found
        found = torch.autograd.grad(tensors, [p for _, p in wanted], allow_unused=True)
    if watch.found is None:
        # The gradients between modules are finite: only a sum over a micro-batch is not.
        for (name, _), gradient in zip(wanted, found, strict=True):
            if gradient is not None and not _is_finite(gradient):
                return watch.of_parameter(name)
    return watch.found


class _Watch:
    """Notes the first number that is not finite, by module."""

    def __init__(self, root: nn.Module) -> None:
        self.found: Finding | None = None
        self._root = root
        self._names = {module: name for name, module in root.named_modules()}

    def name_of(self, module: nn.Module) -> str:
        return self._names[module] or type(module).__name__

    def of_parameter(self, name: str) -> Finding:
        owner = self._root.get_submodule(name.rpartition(".")[0])
        return Finding("gradient", self.name_of(owner), f"of its parameter {name!r}")

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        for module in self._names:
            handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Views: a tensor that goes to several modules gets a gradient from each of them.
        return self._views(module, args), self._views(module, kwargs)

    def _views(self, module: nn.Module, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            view = value.view_as(value)
            view.register_hook(partial(self._gradient, module, leaves=True))
            return view
        if type(value) in (tuple, list):
            return type(value)(self._views(module, item) for item in value)
        if type(value) is dict:
            return {key: self._views(module, item) for key, item in value.items()}
        return value

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.found is not None:
            return
        outputs = list(tensors_of(output))
        bad = [tensor for tensor in outputs if not _is_sound(tensor)]
        if bad:
            only_loss = module is self._root and all(tensor.numel() == 1 for tensor in bad)
            detail = next(
                (
                    f"its parameter {name!r} is not finite"
                    for name, parameter in module.named_parameters(recurse=False)
                    if parameter.numel() and not _is_finite(parameter)
                ),
                "",
            )
            what: What = "loss" if only_loss else "activation"
            self.found = Finding(what, self.name_of(module), detail)
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, module, leaves=False))

    def _gradient(self, module: nn.Module, gradient: Tensor, *, leaves: bool) -> None:
        """Note a gradient that leaves a module's backward pass, or that comes to it."""
        if self.found is not None or _is_finite(gradient):
            return
        name = self._names[module]
        if leaves:
            self.found = Finding("gradient", self.name_of(module))
            return
        # Made by what uses the module's output, which is code of the module around it.
        around = self._root.get_submodule(name.rpartition(".")[0])
        self.found = Finding("gradient", self.name_of(around), f"behind {name or 'its output'!r}")


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _is_sound(tensor: Tensor) -> bool:
    """Whether an output is finite; the infinities of masks, which have no gradient, may be."""
    return _is_finite(tensor) if tensor.requires_grad else not bool(tensor.isnan().any())


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    present = random_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        restore_random_state(present)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
