# SPDX-License-Identifier: Apache-2.0
"""Staleness in an asynchronous pipeline, and the factors of PipeMare's T1 and T2.

The *version* of a stage's weights is its number of optimizer steps. The *delay* is the number of
micro-batches that a stage forwards ahead of its backward passes (`order.ahead`). *Staleness* is the
number of versions between a micro-batch's forward pass and its backward pass.
"""

from __future__ import annotations

from wavemare.errors import PlanError, did_you_mean
from wavemare.pipeline.plan.order import ahead

__all__ = [
    "EXACT_LIMIT",
    "MODES",
    "bounding_micro_batches",
    "ema_decay",
    "ema_decay_from",
    "forward_version",
    "largest_staleness",
    "lr_factor",
    "max_staleness",
    "mean_delay",
    "resolve_mode",
    "staleness_warning",
]

MODES = ("off", "exact", "ema", "predict", "auto")
"""Corrections of the weight discrepancy: none, PipeDream's weight stashing, PipeMare's T2,
SpecTrain's weight prediction, or whichever of stashing and T2 takes less memory."""

EXACT_LIMIT = 2
"""Up to this staleness, stashing takes no more memory than T2."""


def mean_delay(stage: int, num_stages: int, micro_batches: int, slack: int = 0) -> float:
    """Return the mean staleness of a stage, in optimizer steps (tau_i of PipeMare).

    This is for a pipeline that does one pass at a time, where the delay is half that of the paper's
    dataflow machine and 0 on the last stage.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        slack: See `order.ahead`.

    Raises:
        PlanError: There is no such stage, or no micro-batch.
    """
    return _delay(stage, num_stages, micro_batches, slack) / micro_batches


def max_staleness(stage: int, num_stages: int, micro_batches: int, slack: int = 0) -> int:
    """Return the largest staleness of a stage's micro-batches, in optimizer steps.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        slack: See `order.ahead`.

    Raises:
        PlanError: There is no such stage, or no micro-batch.
    """
    return -(-_delay(stage, num_stages, micro_batches, slack) // micro_batches)


def forward_version(micro_batch: int, delay: int, micro_batches: int, drained: int = 0) -> int:
    """Return the version that the forward pass of a micro-batch sees.

    Args:
        micro_batch: Counted from 0 over the whole run.
        delay: Of the stage, in micro-batches.
        micro_batches: Micro-batches per optimizer step.
        drained: The version at which the pipeline was last empty, before this micro-batch.

    Raises:
        PlanError: A number is out of range.
    """
    _check_numbers(micro_batch, delay, micro_batches)
    return max(drained, (micro_batch - delay) // micro_batches)


def lr_factor(step: int, tau: float, anneal_steps: int) -> float:
    """Return what a stage's learning rate is multiplied by (PipeMare's T1).

    The factor is ``1 / max(1, tau) ** (1 - min(step / anneal_steps, 1))``. Without the lower bound
    of 1, short delays would raise the learning rate.

    Args:
        step: Optimizer step, counted from 0.
        tau: Mean delay of the stage in optimizer steps.
        anneal_steps: Optimizer steps until the factor is 1.

    Raises:
        PlanError: There are no annealing steps.
    """
    if anneal_steps < 1:
        reason = "the learning rate is raised over at least one step"
        raise PlanError("anneal_steps", anneal_steps, reason, "Give 1 or more")
    return 1.0 / max(1.0, tau) ** (1.0 - min(step / anneal_steps, 1.0))


def ema_decay(d: int) -> float:
    """Return the decay for which T2's error vanishes to second order in the weights' change.

    Args:
        d: Largest staleness of the stage, in optimizer steps; at 1 the decay is 0, and the estimate
            is the forward pass's weights themselves.

    Raises:
        PlanError: There is no staleness to correct.
    """
    _check_staleness(d)
    return (d - 1) / (d + 1)


def ema_decay_from(base: float, d: int) -> float:
    """Return PipeMare's decay ``D ** (1 / d)``.

    Args:
        base: The paper's D, between 0 and 1.
        d: Largest staleness of the stage, in optimizer steps.

    Raises:
        PlanError: The base is out of range, or there is no staleness to correct.
    """
    _check_staleness(d)
    if not 0 < base < 1:
        reason = "a moving average needs a base between 0 and 1"
        raise PlanError("decay_base", base, reason, "Give for example 0.135, or leave it out")
    return base ** (1 / d)


def resolve_mode(mode: str, max_staleness: int) -> str:
    """Return what a correction mode means for a stage: "off", "exact", "ema" or "predict".

    Args:
        mode: One of `MODES`.
        max_staleness: Largest staleness of the stage, in optimizer steps.

    Raises:
        PlanError: There is no such mode.
    """
    if mode not in MODES:
        raise PlanError("correction", mode, "there is no such mode", did_you_mean(mode, MODES))
    if max_staleness == 0:
        return "off"
    if mode == "auto":
        return "exact" if max_staleness <= EXACT_LIMIT else "ema"
    return mode


def bounding_micro_batches(stages: int, slack: int = 0) -> int:
    """Return the fewest micro-batches per step at which no gradient is more than one step old.

    Args:
        stages: Length of the pipeline.
        slack: See `order.ahead`.
    """
    return max(1, ahead(0, stages, slack))


def largest_staleness(stages: int, micro_batches: int, slack: int = 0) -> tuple[int, float]:
    """Return the largest and mean staleness of the first stage, the stalest one, in steps.

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
    """Return a warning if a step has too few micro-batches to bound the staleness to one step.

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


def _delay(stage: int, num_stages: int, micro_batches: int, slack: int) -> int:
    if not 0 <= stage < num_stages:
        reason = f"a pipeline of {num_stages} stages has no such stage"
        raise PlanError("stage", stage, reason, f"Give 0 to {num_stages - 1}")
    _check_numbers(0, 0, micro_batches)
    return ahead(stage, num_stages, slack)


def _check_numbers(micro_batch: int, delay: int, micro_batches: int) -> None:
    if micro_batches < 1:
        reason = "an optimizer step has at least one micro-batch"
        raise PlanError("micro_batches", micro_batches, reason, "Give 1 or more")
    for key, value in {"micro_batch": micro_batch, "delay": delay}.items():
        if value < 0:
            raise PlanError(key, value, "it is negative", "Give 0 or more")


def _check_staleness(d: int) -> None:
    if d < 1:
        reason = "a stage without staleness needs no moving average"
        raise PlanError("max_staleness", d, reason, "Give 1 or more")
