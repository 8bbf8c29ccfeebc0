# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous pipeline is told at its start: how stale it is, and what bounds that."""

from __future__ import annotations

from wavemare.pipeline.plan.order import ahead
from wavemare.pipeline.staleness.staleness import max_staleness, mean_delay

__all__ = ["bounding_micro_batches", "largest_staleness", "staleness_warning"]


def bounding_micro_batches(stages: int, slack: int = 0) -> int:
    """Return the fewest micro-batches per step at which no gradient is more than one step old.

    Args:
        stages: Length of the pipeline.
        slack: See `order.ahead`.
    """
    return max(1, ahead(0, stages, slack))


def largest_staleness(stages: int, micro_batches: int, slack: int = 0) -> tuple[int, float]:
    """Return the first stage's largest and mean staleness, in optimizer steps: no other's is more.

    Args:
        stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        slack: See `order.ahead`.
    """
    return (
        max_staleness(0, stages, micro_batches, slack),
        mean_delay(0, stages, micro_batches, slack),
    )


def staleness_warning(stages: int, micro_batches: int, slack: int = 0) -> str | None:
    """Return what to tell a user whose micro-batches do not bound the staleness to one step.

    Args:
        stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        slack: See `order.ahead`.
    """
    enough = bounding_micro_batches(stages, slack)
    if micro_batches >= enough:
        return None
    worst, mean = largest_staleness(stages, micro_batches, slack)
    return (
        f"pipemare: {micro_batches} micro-batches per optimizer step on {stages} stages make the "
        f"first stage's gradients up to {worst} steps old ({mean:.2f} in the mean); with "
        f"{enough} or more (gradient_accumulation_steps, or a smaller "
        "train_micro_batch_size_per_gpu) none is older than 1"
    )
