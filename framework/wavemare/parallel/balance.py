# SPDX-License-Identifier: Apache-2.0
"""Layouts from measured times: a job's work shared among ranks of unlike speed.

Two measured sizes of micro-batch make a line of seconds for each rank; measured layers make cuts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from wavemare.engine.checkpoint.random_state import random_state, restore_random_state
from wavemare.engine.launch.group import gather
from wavemare.errors import PlanError
from wavemare.models.timing import device_time
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.stages import StageProblem, balanced_shares, cut_stages, pipeline_s

_UNLIMITED = 1e30
_WARMUPS = 4
"""Passes after a change of the batch size that take up to half as long again, seen on CPUs."""
_ROUNDS = 8
_LIMIT_S = 15.0


def balance_replicas(
    model: Any,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    batch: Mapping[str, int],
    *,
    zero_stage: int = 0,
    sequence_length: int = 1,
    dtype: torch.dtype | None = None,
) -> Layout:
    """Measure all ranks of a data-parallel job, and share its micro-batches among them.

    Args:
        model: Whole on every rank.
        batch_of: From a number of samples to a batch.
        batch: DeepSpeed's three batch sizes by their keys.
        zero_stage: Of ZeRO; for the layout.
        sequence_length: Tokens of a sample; for the prediction.
        dtype: Of autocast while measuring, for a job that computes in 16 bits.

    Returns:
        The layout, equal on all ranks.
    """
    micro, ranks = batch["train_micro_batch_size_per_gpu"], dist.get_world_size()
    lines = measure_speeds(model, batch_of, (max(micro // 2, 1), micro), dtype=dtype)
    shares = shares_for(lines, micro * ranks)
    steps = batch["gradient_accumulation_steps"]
    rank_s = tuple(steps * line.seconds(share) for line, share in zip(lines, shares, strict=True))
    stage_s = (max(rank_s) / steps,)
    predicted = _prediction(rank_s, stage_s, batch["train_batch_size"] * sequence_length)
    return Layout(
        data_parallel=ranks,
        global_batch=batch["train_batch_size"],
        micro_steps=steps,
        shares=shares,
        zero_stage=zero_stage,
        predicted=predicted,
    )


def _prediction(rank_s: tuple[float, ...], stage_s: tuple[float, ...], tokens: int) -> Prediction:
    return Prediction(
        step_s=max(rank_s),
        tokens_per_s=tokens / max(rank_s),
        stage_s=stage_s,
        rank_s=rank_s,
        memory_bytes=(),
    )


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
    table: NDArray[np.float64],
    batch: Mapping[str, int],
    *,
    stages: int,
    schedule: str = "1f1b",
    zero_stage: int = 0,
    sequence_length: int = 1,
) -> Layout:
    """Cut a model so that all stages take as long, by what each layer takes on each rank.

    Where several replicas put unlike ranks at the same stage, the slowest of them counts, and the
    replicas' shares follow their own slowest stages.

    Args:
        table: Seconds of a micro-batch, (ranks, layers); see `wavemare.models.timing.rank_times`.
        batch: DeepSpeed's three batch sizes by their keys.
        stages: Of the pipeline.
        schedule: For the layout.
        zero_stage: For the layout.
        sequence_length: Tokens of a sample; for the prediction.

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
    rank_s = tuple(pipeline_s(list(map(float, row)), steps, schedule) for row in scaled)
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
        predicted=_prediction(
            rank_s,
            tuple(map(float, scaled.max(axis=0))),
            batch["train_batch_size"] * sequence_length,
        ),
    )


class Line(NamedTuple):
    """Seconds that grow with the number of samples.

    Args:
        fixed_s: Seconds however few samples there are.
        sample_s: Seconds of each sample.
    """

    fixed_s: float
    sample_s: float

    def seconds(self, samples: int) -> float:
        """Return the seconds of so many samples."""
        return self.fixed_s + samples * self.sample_s


def measure_speeds(
    model: Any,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    sizes: tuple[int, int],
    *,
    dtype: torch.dtype | None = None,
) -> list[Line]:
    """Measure forward and backward passes of a model on every rank, all at the same time.

    Neither weights, gradients nor random state are changed. The model is moved to the device.

    Args:
        model: Returns an output with ``.loss``; equal on all ranks.
        batch_of: From a number of samples to a batch.
        sizes: A small and a larger micro-batch, in samples; it may take up to 15 s to measure.
        dtype: Of autocast, for a job that computes in 16 bits; None for that of the weights.

    Returns:
        For each rank the seconds of forward and backward pass by the number of samples, from
        medians of eight rounds, fewer of slow ones.
    """
    device = torch.device(get_accelerator().current_device_name())
    model.to(device)
    training, random = model.training, random_state()
    model.train()
    try:
        # The larger one first: allocators keep what it needs.
        points = [_measure(model, batch_of(size), device, dtype) for size in reversed(sizes)]
    finally:
        model.train(training)
        restore_random_state(random)
    large, small = points
    return gather(_line(sizes, small, large))


def example_samples(model: Any, sequence_length: int, samples: int) -> dict[str, Tensor]:
    """Return a batch of so many samples for a transformers model with a head.

    Labels are the tokens, or zeros for a classifier.

    Args:
        model: Whose configuration says which labels it takes.
        sequence_length: Tokens of a sample.
        samples: Their number.
    """
    tokens = (torch.arange(samples * sequence_length) * 7 + 3) % model.config.vocab_size
    tokens = tokens.view(samples, sequence_length)
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    labels = torch.zeros(samples, dtype=torch.long) if classifies else tokens
    return {"input_ids": tokens, "labels": labels}


def _measure(
    model: Any, batch: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype | None
) -> float:
    batch = {name: value.to(device) for name, value in batch.items()}
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    whole = []
    deadline = time.perf_counter() + _LIMIT_S / 2
    for _ in range(_WARMUPS + _ROUNDS):
        dist.barrier()  # unlike programs on one machine disturb each other as they will later
        started = device_time()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = model(**batch).loss
        # Not backward(), which would leave gradients in the parameters.
        torch.autograd.grad(loss, weights, allow_unused=True)
        ended = device_time()
        whole.append(ended - started)
        if _any_rank(ended > deadline, device) and len(whole) > 1:
            break
    warm = min(_WARMUPS, len(whole) // 2)
    return median(whole[warm:])


def _line(sizes: Sequence[int], small_s: float, large_s: float) -> Line:
    small, large = sizes
    if large == small:
        return Line(0.0, large_s / large)
    slope = (large_s - small_s) / (large - small)
    # Noise must not make more samples free, nor a fixed cost negative.
    slope = min(max(slope, 0.1 * large_s / large), large_s / large)
    return Line(large_s - slope * large, slope)


def _any_rank(condition: bool, device: torch.device) -> bool:
    verdict = torch.tensor(int(condition), device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    return bool(verdict)
