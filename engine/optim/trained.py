# SPDX-License-Identifier: Apache-2.0
"""Which weights are trained, beside those that the optimizer got at first."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from wavemare.engine.observe.choices import tell_warning
from wavemare.errors import ModelError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_FROZEN_LATE = (
    "frozen layers: some were frozen after initialize. ZeRO and 16-bit types step flat copies of"
    " the weights, which go on by momentum and weight decay. Freeze layers before initialize, or"
    " use ZeRO 0 in fp32"
)


class TrainedWeights:
    """The weights of an engine's model that were trained at first.

    Args:
        engine: A DeepSpeed engine, complete.
    """

    def __init__(self, engine: EngineMixin) -> None:
        self._module: Any = weakref.ref(engine.module)
        self._weights = [p for p in engine.module.parameters() if p.requires_grad]
        self._is_flat = engine.optimizer is not engine.basic_optimizer
        self._has_told = False

    def check(self) -> None:
        """Look at what is frozen now, before a step.

        Raises:
            ModelError: All of them are frozen, and others are trained, which no optimizer has.
        """
        if all(weight.requires_grad for weight in self._weights):
            return
        module = self._module()
        trained = any(weight.requires_grad for weight in self._weights)
        if not trained and any(weight.requires_grad for weight in module.parameters()):
            reason = "it came after initialize, so no optimizer has its weights; all others froze"
            remedy = (
                "Call peft.get_peft_model before initialize, or give the optimizer's weights"
                " requires_grad again"
            )
            raise ModelError(type(module).__name__, "an adapter", reason, remedy)
        if self._is_flat and not self._has_told:
            self._has_told = True
            tell_warning(_FROZEN_LATE)

    def close(self) -> None:
        """Forget the weights."""
        self._weights = []
