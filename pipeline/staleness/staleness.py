# SPDX-License-Identifier: Apache-2.0
"""Staleness in an asynchronous pipeline, and the factors of PipeMare's T1 and T2.

The *version* of a stage's weights is its number of optimizer steps. The *delay* is the number of
micro-batches that a stage forwards ahead of its backward passes (`orders.ahead`). *Staleness* is
the number of versions between a micro-batch's forward pass and its backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wavemare.errors import PlanError, did_you_mean
from wavemare.pipeline.plan.orders import ahead

MODES = ("off", "exact", "ema", "predict", "auto")
"""Corrections of the weight discrepancy: none, PipeDream's weight stashing, PipeMare's T2,
SpecTrain's weight prediction, or whichever of stashing and T2 takes less memory on a stage."""

_EXACT_LIMIT = 2
"""Up to this staleness, stashing takes no more memory than T2."""


@dataclass(frozen=True)
class Measured:
    """What an optimizer makes of stale gradients, as runs have shown.

    Args:
        optimizer: The name of its class; empty for all that have no rows of their own.
        up_to: Of the first stage's largest staleness, in optimizer steps.
        correction: What ``auto`` is for ``discrepancy_correction``; here ``auto`` goes by the
            memory of each stage, see `resolve_mode`.
        at: The largest staleness in the runs; 0 where there were none.
        gap: Of the validation loss to that of synchronous steps with the same optimizer, relative.
        memory: States of the optimizer and of the correction, in weights.
        source: The file in docs/results.
    """

    optimizer: str
    up_to: float
    correction: str
    at: int = 0
    gap: float = math.nan
    memory: float = math.nan
    source: str = ""


MEASURED = (
    Measured("Muon", 1, "predict", 1, 0.001, 2.83, "async-quality-muon-8x8.json"),
    Measured("Muon", 2, "predict", 2, 0.017, 2.91, "async-quality-muon-4x2.json"),
    Measured("Muon", math.inf, "auto", 7, 0.291, 3.72, "async-quality-table.json"),
    Measured("SOAP", 1, "predict", 1, -0.005, 12.52, "async-quality-8x8.json"),
    Measured("SOAP", math.inf, "auto", 7, 0.266, 12.41, "async-quality-8x1.json"),
    Measured("AdamW", 1, "auto", 1, 0.160, 2.0, "async-quality-8x8-naive.json"),
    Measured("AdamW", math.inf, "auto", 7, 0.448, 2.0, "async-quality-8x1-naive.json"),
    Measured("", math.inf, "auto"),
)
"""By optimizer, then by staleness: one table for the engine, the policy, the simulation, ``wavemare
plan show`` and docs/asynchronous.md. Muon and SOAP were run with error feedback and the correction
of their row, AdamW as it is."""

_MUON_STALENESS = 2
_SAME = {"adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw"}


def measured(optimizer: str, worst: int) -> Measured:
    """Return the row of `MEASURED` for an optimizer and a staleness of the first stage.

    Args:
        optimizer: Its name in any case, that of the configuration or of its class.
        worst: As of `largest_staleness`.
    """
    name = _SAME.get(optimizer.lower(), optimizer.lower())
    rows = [row for row in MEASURED if row.optimizer.lower() == name] or MEASURED[-1:]
    return next(row for row in rows if worst <= row.up_to)


def policy_optimizer(worst: int) -> str:
    """Return what the policy takes in place of Adam: at 7 steps SOAP learns better than Muon."""
    return "Muon" if worst <= _MUON_STALENESS else "SOAP"


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
    adam, name = measured("AdamW", worst), policy_optimizer(worst)
    row = measured(name, worst)
    lag = (
        f"AdamW suffers from gradients up to {_steps(worst)} old ({mean:.2f} on average): "
        f"{_gap(adam, 'AdamW')}. First, make more steps at the start synchronous (warmup_steps)"
    )
    found = _gap(row, name) if row.at else "its loss was not measured"
    memory = f"{row.memory:.3g}" if row.at else "no more"
    policy = {
        "Muon": "updates matrices with Muon and error feedback, at the same lr and weight_decay. "
        "In each step, this takes as many operations as the passes of 4 tokens for each unit of "
        "width",
        "SOAP": "takes SOAP with error feedback. With small steps, this takes much time; smaller "
        "micro-batches make gradients fresher",
    }[name]
    return (
        f'{lag}. Then try "optimizer_policy": "auto", which {policy}. It holds {memory} copies of '
        f"the weights, and AdamW {adam.memory:.3g}; {found}. docs/asynchronous.md has all runs"
    )


def _gap(row: Measured, name: str) -> str:
    side = "above" if row.gap >= 0 else "below"
    return f"{_at(row)}, its loss was {abs(row.gap):.1%} {side} that of synchronous {name}"


def _at(row: Measured) -> str:
    return f"in runs with gradients up to {_steps(row.at)} old"


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"
