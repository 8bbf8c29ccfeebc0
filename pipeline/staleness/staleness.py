# SPDX-License-Identifier: Apache-2.0
"""Staleness in an asynchronous pipeline, and the factors of PipeMare's T1 and T2.

The *version* of a stage's weights is its number of optimizer steps. The *delay* is the number of
micro-batches that a stage forwards ahead of its backward passes (`orders.ahead`). *Staleness* is
the number of versions between a micro-batch's forward pass and its backward pass.
"""

from __future__ import annotations

from wavemare.errors import PlanError, did_you_mean
from wavemare.pipeline.plan.orders import ahead

MODES = ("off", "exact", "ema", "predict", "auto")
"""Corrections of the weight discrepancy: none, PipeDream's weight stashing, PipeMare's T2,
SpecTrain's weight prediction, or whichever of stashing and T2 takes less memory."""

MUON_STALENESS = 2
"""Up to this staleness the policy takes Muon, beyond SOAP: at 7 steps SOAP learns better."""

_EXACT_LIMIT = 2
"""Up to this staleness, stashing takes no more memory than T2."""


def mean_staleness(stage: int, num_stages: int, micro_batches: int, slack: int = 0) -> float:
    """Return the mean staleness of a stage, in optimizer steps (tau_i of PipeMare).

    This is for a pipeline that does one pass at a time, where the delay is half that of the paper's
    dataflow machine and 0 on the last stage.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        slack: See `orders.ahead`.
    """
    return ahead(stage, num_stages, slack) / micro_batches


def max_staleness(stage: int, num_stages: int, micro_batches: int, slack: int = 0) -> int:
    """Return the largest staleness of a stage's micro-batches.

    Arguments as for `mean_staleness`.
    """
    return -(-ahead(stage, num_stages, slack) // micro_batches)


def lr_factor(step: int, tau: float, anneal_steps: int) -> float:
    """Return what a stage's learning rate is multiplied by (PipeMare's T1).

    The factor is ``1 / max(1, tau) ** (1 - min(step / anneal_steps, 1))``. Without the lower bound
    of 1, short delays would raise the learning rate.

    Args:
        step: Optimizer step, counted from 0.
        tau: Mean staleness of the stage in optimizer steps.
        anneal_steps: Optimizer steps until the factor is 1.
    """
    return 1.0 / max(1.0, tau) ** (1.0 - min(step / anneal_steps, 1.0))


def ema_decay(d: int, base: float | None = None) -> float:
    """Return the decay of T2's moving average.

    Args:
        d: Largest staleness of the stage, in optimizer steps, 1 or more.
        base: The paper's D, for the decay ``D ** (1 / d)``. If omitted, T2's error vanishes to
            second order in the weights' change; at ``d`` 1 the decay is then 0, and the estimate is
            the forward pass's weights themselves.
    """
    return (d - 1) / (d + 1) if base is None else base ** (1 / d)


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
        return "exact" if max_staleness <= _EXACT_LIMIT else "ema"
    return mode


def bounding_micro_batches(stages: int, slack: int = 0) -> int:
    """Return the fewest micro-batches per step at which no gradient is more than one step old."""
    return max(1, ahead(0, stages, slack))


def largest_staleness(stages: int, micro_batches: int, slack: int = 0) -> tuple[int, float]:
    """Return the largest and mean staleness of the first stage, the stalest one, in steps."""
    sizes = stages, micro_batches, slack
    return max_staleness(0, *sizes), mean_staleness(0, *sizes)


def staleness_warning(stages: int, micro_batches: int, slack: int = 0) -> str | None:
    """Return a warning if a step has too few micro-batches to bound the staleness to one step."""
    enough = bounding_micro_batches(stages, slack)
    if micro_batches >= enough:
        return None
    worst, mean = largest_staleness(stages, micro_batches, slack)
    return (
        f"pipemare: {micro_batches} micro-batches per optimizer step on {stages} stages make the "
        f"first stage's gradients up to {worst} steps old ({mean:.2f} on average); with "
        f"{enough} or more (gradient_accumulation_steps, or a smaller "
        "train_micro_batch_size_per_gpu) none is older than 1"
    )


def policy_offer(worst: int, mean: float) -> str | None:
    """Return what AdamW loses by staleness, and what the policy ``auto`` gives at which price.

    None if no gradient is stale. The arguments are those that `largest_staleness` returns.
    """
    if not worst:
        return None
    lag = f"AdamW learns worse from gradients up to {worst} steps old ({mean:.2f} on average)"
    if worst <= MUON_STALENESS:
        offer = (
            "steps matrices by Muon with error feedback, at the same lr and weight_decay: the loss "
            "is about that of a synchronous pipeline with Muon. It costs no memory, and in each "
            "step as many operations as the passes of 4 tokens for each unit of width"
        )
    else:
        offer = (
            "takes SOAP with error feedback, which loses less, and needs 5 to 10 more copies of "
            "the weights and much time in small steps. Smaller micro-batches make gradients fresher"
        )
    return f'{lag}. "optimizer_policy": "auto" {offer} (docs/asynchronous.md)'
