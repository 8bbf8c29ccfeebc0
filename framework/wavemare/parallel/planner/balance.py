# SPDX-License-Identifier: Apache-2.0
"""One number per device: plans that share a job's work among ranks of unlike speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from wavemare.errors import PlanError
from wavemare.models.families import family_of
from wavemare.models.timing import rank_layer_times
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.speed import Line, measure_speeds
from wavemare.parallel.planner.stages import StageProblem, balanced_shares, cut_stages, pipeline_s

__all__ = ["balance_replicas", "balance_stages", "measure_layers", "plan_stages", "shares_for"]

_UNLIMITED = 1e30


def balance_replicas(
    model: Any,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    batch: Mapping[str, int],
    *,
    zero_stage: int = 0,
    sequence_length: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[Layout, list[Line]]:
    """Measure all ranks of a data-parallel job, and share its micro-batches among them.

    Args:
        model: Whole on every rank.
        batch_of: From a number of samples to a batch.
        batch: DeepSpeed's three batch sizes by their keys.
        zero_stage: Of ZeRO; for the plan.
        sequence_length: Tokens of a sample; for the prediction.
        dtype: Of autocast while measuring, for a job that computes in 16 bits.

    Returns:
        The plan, and for each rank its seconds by the number of samples; equal on all ranks.
    """
    micro, ranks = batch["train_micro_batch_size_per_gpu"], dist.get_world_size()
    lines = measure_speeds(model, batch_of, (max(micro // 2, 1), micro), dtype=dtype)
    shares = shares_for(lines, micro * ranks)
    steps = batch["gradient_accumulation_steps"]
    rank_s = tuple(steps * line.seconds(share) for line, share in zip(lines, shares, strict=True))
    plan = Layout(
        data_parallel=ranks,
        global_batch=batch["train_batch_size"],
        micro_steps=steps,
        shares=shares,
        zero_stage=zero_stage,
        predicted=Prediction(
            step_s=max(rank_s),
            tokens_per_s=batch["train_batch_size"] * sequence_length / max(rank_s),
            stage_s=(max(rank_s) / steps,),
            rank_s=rank_s,
            memory_bytes=(),
        ),
    )
    return plan, lines


def shares_for(lines: Sequence[Line], samples: int) -> tuple[int, ...]:
    """Return the shares whose slowest rank is done first; each rank gets a sample at least.

    Raises:
        PlanError: There are fewer samples than ranks.
    """
    caps = [samples] * len(lines)
    shares = balanced_shares(samples, lambda rank, n: lines[rank].seconds(n), caps, least=1)
    if shares is None:
        reason = f"they cannot be shared by {len(lines)} ranks"
        raise PlanError("samples", samples, reason, "Use larger micro-batches or fewer ranks")
    return shares


def balance_stages(
    model: Any,
    batch: Mapping[str, int],
    *,
    stages: int,
    schedule: str = "1f1b",
    inputs: Sequence[str] | None = None,
    zero_stage: int = 0,
    sequence_length: int = 1,
    dtype: torch.dtype | None = None,
) -> Layout:
    """Measure every layer on every rank, and cut the model so that all stages take as long.

    Where several replicas put unlike ranks at the same stage, the slowest of them counts, and the
    replicas' shares follow their own slowest stages.

    Args:
        model: Whole on every rank.
        batch: DeepSpeed's three batch sizes by their keys.
        stages: Of the pipeline.
        schedule: ``1f1b`` or ``pipemare``; for the plan.
        inputs: Names of the tensors that enter the first layer; the family's default if omitted.
        zero_stage: Of ZeRO; for the plan.
        sequence_length: Tokens of a sample.
        dtype: Of autocast while measuring, for a job that computes in 16 bits.

    Returns:
        The plan, equal on all ranks.

    Raises:
        PlanError: The model has fewer layers than there are stages.
    """
    table = measure_layers(
        model,
        samples=batch["train_micro_batch_size_per_gpu"],
        sequence_length=sequence_length,
        inputs=inputs,
        dtype=dtype,
    )
    return plan_stages(
        table,
        batch,
        stages=stages,
        schedule=schedule,
        zero_stage=zero_stage,
        sequence_length=sequence_length,
    )


def measure_layers(
    model: Any,
    *,
    samples: int,
    sequence_length: int,
    inputs: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> NDArray[np.float64]:
    """Measure forward and backward pass of each layer on every rank.

    Args:
        model: Whole on every rank.
        samples: Of a micro-batch.
        sequence_length: Tokens of a sample.
        inputs: Names of the tensors that enter the first layer; the family's default if omitted.
        dtype: Of autocast, for a job that computes in 16 bits.

    Returns:
        Seconds, (ranks, layers), equal on all ranks; the loss is part of the last layer.
    """
    family = family_of(model)
    names = family.declared(inputs)
    chain, loss = tuple(family.chain(model, names)), family.loss(model)
    return np.array(
        rank_layer_times(
            model, chain, names, loss, texts=samples, tokens=sequence_length, dtype=dtype
        )
    )


def plan_stages(
    table: NDArray[np.float64],
    batch: Mapping[str, int],
    *,
    stages: int,
    schedule: str = "1f1b",
    zero_stage: int = 0,
    sequence_length: int = 1,
) -> Layout:
    """Return the plan for measured layers; the arguments are those of `balance_stages`.

    Args:
        table: Of `measure_layers`.
        batch: DeepSpeed's three batch sizes by their keys.
        stages: Of the pipeline.
        schedule: For the plan.
        zero_stage: For the plan.
        sequence_length: Tokens of a sample.

    Raises:
        PlanError: There are fewer layers than stages.
    """
    micro, steps = batch["train_micro_batch_size_per_gpu"], batch["gradient_accumulation_steps"]
    replicas = len(table) // stages
    # Rank stage * replicas + replica, as DeepSpeed counts them.
    seconds = table.reshape(stages, replicas, -1)
    zeros = np.zeros(table.shape[1])
    problem = StageProblem(
        seconds=seconds.max(axis=1),
        static_bytes=zeros,
        activation_bytes=zeros,
        memory_bytes=np.full(stages, _UNLIMITED),
        hop_s=np.zeros(stages),
        in_flight=tuple(min(steps, stages - stage) for stage in range(stages)),
    )
    cut = cut_stages(problem, range(stages))
    if cut is None:
        reason = f"the model has only {len(zeros)} layers"
        raise PlanError("stages", stages, reason, "Use fewer stages")
    spans = list(zip(cut.bounds, cut.bounds[1:], strict=False))
    own = np.array(
        [[seconds[s, r, a:b].sum() for s, (a, b) in enumerate(spans)] for r in range(replicas)]
    )
    lines = [Line(0.0, float(row.max()) / micro) for row in own]
    shares = shares_for(lines, micro * replicas)
    scaled = own * (np.array(shares) / micro)[:, None]
    rank_s = tuple(pipeline_s(list(map(float, row)), steps) for row in scaled)
    return Layout(
        stages=stages,
        data_parallel=replicas,
        cuts=cut.bounds,
        num_layers=len(zeros),
        schedule=schedule,
        zero_stage=zero_stage,
        global_batch=batch["train_batch_size"],
        micro_steps=steps,
        shares=shares,
        predicted=Prediction(
            step_s=max(rank_s),
            tokens_per_s=batch["train_batch_size"] * sequence_length / max(rank_s),
            stage_s=tuple(map(float, scaled.max(axis=0))),
            rank_s=rank_s,
            memory_bytes=(),
        ),
    )
