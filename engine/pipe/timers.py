# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's timers of a pipeline, for ``wall_clock_breakdown``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.pipe.engine import (
    BATCH_INPUT_TIMER,
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
)

from wavemare.pipeline.plan.plan import Action, Kind

_TIMERS = {
    Kind.LOAD: (BATCH_INPUT_TIMER,),
    Kind.RECV_ACTIVATION: (PIPE_RECV_INPUT_TIMER,),
    Kind.SEND_ACTIVATION: (PIPE_SEND_OUTPUT_TIMER,),
    Kind.RECV_GRAD: (PIPE_RECV_GRAD_TIMER,),
    Kind.SEND_GRAD: (PIPE_SEND_GRAD_TIMER,),
}
"""By the kind of an action; DeepSpeed itself starts those of passes and optimizer steps."""


def timed(
    engine: Any, handlers: Mapping[Kind, Callable[[Action], None]]
) -> dict[Kind, Callable[[Action], None]]:
    """Return what does each kind of action, within DeepSpeed's timers if they are wanted."""
    if not engine.wall_clock_breakdown():
        return dict(handlers)
    return {
        kind: _within([engine.timers(name) for name in _TIMERS.get(kind, ())], do)
        for kind, do in handlers.items()
    }


def _within(timers: list[Any], do: Callable[[Action], None]) -> Callable[[Action], None]:
    def run(action: Action) -> None:
        for timer in timers:
            timer.start()
        do(action)
        for timer in timers:
            timer.stop()

    return run if timers else do
