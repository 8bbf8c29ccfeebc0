# SPDX-License-Identifier: Apache-2.0
"""Training to be judged by what was learned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from wavemare.bench.training.request import TrainingRequest
from wavemare.bench.training.systems import System, held_out_loss
from wavemare.bench.training.task import Task
from wavemare.observe import Screen

__all__ = ["Curve", "learning_rate", "train"]

_EVALUATIONS = 20
_WARMUP = 0.1


@dataclass
class Curve:
    """What a system learned.

    Args:
        losses: The training loss of each step, mean over the ranks.
        held_out: Pairs of steps done and held-out loss, the first before the first step.
        bytes_up: Bytes that rank 0's collectives sent; None for stock systems.
    """

    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    bytes_up: int | None = None


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Return the rate of a step: it rises for a tenth of the steps, then falls to zero.

    Args:
        step: Counted from 0.
        steps: All there will be.
        highest: The rate at the end of the rise.
    """
    rising = max(1, round(_WARMUP * steps))
    if step < rising:
        return highest * (step + 1) / rising
    return highest * (steps - step) / (steps - rising)


def train(request: TrainingRequest, task: Task, name: str, system: System, screen: Screen) -> Curve:
    """Train; all ranks must call it together.

    Args:
        request: Has the number of steps.
        task: What is learned.
        name: Of the system, to be shown.
        system: Trains.
        screen: Shows the progress.
    """
    steps = request.quality_steps
    assert steps is not None
    curve = Curve(held_out=[(0, held_out_loss(system.model, task))])
    every = max(1, steps // _EVALUATIONS)
    for step in range(steps):
        system.set_learning_rate(learning_rate(step, steps, request.learning_rate))
        loss = system.step(task.batch(step, dist.get_rank()))
        dist.all_reduce(loss)
        curve.losses.append(float(loss / request.ranks))
        if "sparse_bytes_up" in system.figures:
            curve.bytes_up = (curve.bytes_up or 0) + int(system.figures["sparse_bytes_up"])
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.held_out.append((step + 1, held_out_loss(system.model, task)))
            screen.note(f"{name}, step {step + 1}: held-out loss {curve.held_out[-1][1]:.4f}")
    return curve
