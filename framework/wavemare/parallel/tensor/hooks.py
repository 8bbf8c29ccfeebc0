# SPDX-License-Identifier: Apache-2.0
"""Which hooks would see a rank's part, where layers are split."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from wavemare.engine.parts import called_by_library
from wavemare.parallel.tensor.partition import hook_refusal, partition_of

_BACKWARD = frozenset({"register_backward_hook", "register_full_backward_hook"})
OF_INPUTS = _BACKWARD | {"register_forward_pre_hook"}
"""Methods whose hooks see inputs, or their gradients. That hooks of outputs get inputs, too, does
not count: these are for outputs."""
OF_OUTPUTS = _BACKWARD | {"register_forward_hook", "register_full_backward_pre_hook"}
"""Methods whose hooks see outputs, or their gradients."""
OF_GRADIENTS = _BACKWARD
"""Methods whose hooks see gradients of inputs, which may be to be summed over the ranks."""

_known: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def note_hooks(module: nn.Module, names: frozenset[str]) -> None:
    """Note methods of a module whose hooks would see a part, beside those that are noted."""
    _known[module] = _known.get(module, frozenset()) | names


def forget_hooks(module: nn.Module) -> None:
    """Forget what `note_hooks` has noted: the module is whole again."""
    _known.pop(module, None)


def hooks_of_parts(model: nn.Module) -> dict[nn.Module, frozenset[str]]:
    """Return what is noted of the modules in a model."""
    return {module: _known[module] for module in model.modules() if module in _known}


def refuse_late_hooks(model: nn.Module) -> None:
    """Let the parts of a model's weights refuse hooks of their gradients from now on.

    Those that were there before get the whole gradients. Libraries know what they register.
    """
    for name, part in model.named_parameters():
        # Quantized ones have no gradient, and torch exchanges no tensor that has weak references.
        if partition_of(part) is not None and type(part) is nn.Parameter:
            for method in ("register_hook", "register_post_accumulate_grad_hook"):
                vars(part)[method] = _LateHook(part, name, method)


class _LateHook:
    """Stands for a method of a rank's part of a weight that would register a hook.

    Args:
        part: The rank's; None in what was read from a file.
        name: Of the weight.
        method: The method's name.
    """

    def __init__(self, part: nn.Parameter | None, name: str, method: str) -> None:
        self._part = None if part is None else ref(part)  # a cycle would keep it until it is found
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._part and self._part()
        if part is None or not called_by_library():
            raise hook_refusal(self._name, self._method)
        return getattr(type(part), self._method)(part, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _LateHook, (None, self._name, self._method)
