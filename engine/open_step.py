# SPDX-License-Identifier: Apache-2.0
"""Leaving a step of which some micro-batches are done."""

from __future__ import annotations

from typing import Any

from wavemare.engine.optim.adapter import adapt

__all__ = ["leave_open_step"]


def leave_open_step(engine: Any) -> None:
    """Drop the gradients that no optimizer step has taken; the next micro-batch begins a step.

    DeepSpeed drops them after its own steps alone: after an error, or a load of other weights,
    they would count as the next step's.

    Args:
        engine: Of DeepSpeed's, outside of a backward pass.
    """
    adapt(engine).discard_gradients()
    engine._unmanaged_backward_count = 0
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    if engine.pipeline_parallelism:
        for name in engine.timers.timers:  # an error leaves them running
            engine.timers(name).reset()
