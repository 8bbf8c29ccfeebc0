# SPDX-License-Identifier: Apache-2.0
"""What transformers' training loop holds in place of an engine that trains whole steps."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DeepSpeedSchedulerWrapper

from wavemare.lazy import Proxy


class EngineScheduler(DeepSpeedSchedulerWrapper):
    """Shows an engine's scheduler, which is another one after a load that replaced the optimizer.

    Args:
        engine: Steps the scheduler.
        optimizers: As transformers wraps them.
    """

    def __init__(self, engine: Any, optimizers: Any) -> None:
        self._engine = engine
        super().__init__(None, optimizers)

    @property
    def scheduler(self) -> Any:
        """The engine's."""
        return self._engine.lr_scheduler

    @scheduler.setter
    def scheduler(self, _: Any) -> None:
        """Leave it to the engine."""


class LoopModel(Proxy):
    """An engine in the Trainer's loop, which must not clear the gradients of pending passes."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients when it steps."""
