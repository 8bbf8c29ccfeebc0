# SPDX-License-Identifier: Apache-2.0
"""What accelerate's loop has in place of its own optimizers and schedulers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import nn

from wavemare.engine.observe.choices import tell_warning
from wavemare.engine.parts import called_by_library

_READ = (
    "gradients: model.parameters() was read between backward and optimizer.step(). The engine steps"
    " in backward and keeps no gradients, so that torch.nn.utils.clip_grad_norm_ or another change"
    " of them does nothing. Call accelerator.clip_grad_norm_, and write its norm as"
    ' "gradient_clipping" in the DeepSpeed file. If you read weights alone, nothing is lost'
)


@dataclass
class Steps:
    """What is known of the present step.

    Args:
        has_stepped: Whether the engine has, and ``optimizer.step()`` was not called since.
        has_read: Whether the script has read the engine's parameters since, as for gradients.
        has_told: Whether it has been told that there are none.
    """

    has_stepped: bool = False
    has_read: bool = False
    has_told: bool = False


class SteppedOptimizer(DeepSpeedOptimizerWrapper):
    """Notes that the script steps; the engine has done so in ``backward``.

    Attributes:
        steps: Of its accelerator.
    """

    steps: Steps

    def step(self) -> None:
        """Begin another step."""
        steps = self.steps
        if steps.has_read and not steps.has_told:
            steps.has_told = True
            tell_warning(_READ)
        steps.has_stepped = steps.has_read = False


def note_reads(engine: Any, steps: Steps) -> None:
    """Note where a script reads an engine's parameters while it may look for gradients."""
    own: Any = weakref.ref(engine)  # a cycle would keep the engine until it is found

    def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
        steps.has_read |= steps.has_stepped and not called_by_library()
        return nn.Module.parameters(own(), recurse)

    engine.parameters = parameters


def scheduler_of(data_ranks: int) -> type[AcceleratedScheduler]:
    """Return accelerate's scheduler, which steps once for each data rank."""

    class Scheduler(AcceleratedScheduler):
        def step(self, *args: Any, **kwargs: Any) -> None:
            states = PartialState._shared_state, AcceleratorState._shared_state
            processes = states[0]["num_processes"]
            for state in states:
                state["num_processes"] = data_ranks
            try:
                super().step(*args, **kwargs)
            finally:
                for state in states:
                    state["num_processes"] = processes

    return Scheduler
