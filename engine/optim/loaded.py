# SPDX-License-Identifier: Apache-2.0
"""Weights that a script loads or changes between steps, taken over by fp32 masters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wavemare.engine.optim.adapter import adapt

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


class LoadedWeights:
    """Lets what changes the model's weights change the masters, too: the next step would undo it.

    That is ``module.load_state_dict``, and changes in place that autograd counts. It does not count
    those of ``parameter.data``. Stages that never wait hold weights of several steps, and are left
    out.

    Args:
        engine: Complete; None does nothing, as in a copy of the module.

    Attributes:
        paused: Whether the engine itself loads, and takes the masters from elsewhere.
    """

    paused = False

    def __init__(self, engine: EngineMixin | None = None) -> None:
        self._engine: Callable[[], EngineMixin | None]
        self._engine = (lambda: None) if engine is None else weakref.ref(engine)
        self._hook: Any = None
        self._weights: list[Tensor] = []
        if engine is not None and hasattr(engine.optimizer, "refresh_fp32_params"):
            self._hook = engine.module.register_load_state_dict_post_hook(self)
            if not engine.settings.pipeline.is_asynchronous:
                self._weights = list(engine.module.parameters())
        self.note()

    def note(self) -> None:
        """Note which weights the masters have."""
        self._versions = [weight._version for weight in self._weights]

    def take_changes(self) -> None:
        """Take weights that were changed since `note`; a step calls it."""
        if any(w._version != v for w, v in zip(self._weights, self._versions, strict=True)):
            self(None, None)

    def __call__(self, module: Any, incompatible_keys: Any) -> None:
        """Take the weights that have been loaded into a module."""
        engine = self._engine()
        if engine is not None and not self.paused:
            adapt(engine).take_changed()

    def __reduce__(self) -> Any:
        return LoadedWeights, ()

    def close(self) -> None:
        """Leave the module as it was."""
        self._weights, self._versions = [], []
        if self._hook is not None:
            self._hook.remove()
