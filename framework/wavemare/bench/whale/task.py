# SPDX-License-Identifier: Apache-2.0
"""What is trained: a GPT without dropout, on random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from wavemare.bench.gpt import SEED
from wavemare.bench.rounds import rotated
from wavemare.bench.share_requests import ask_for_share
from wavemare.bench.wave.disturbance import Patience
from wavemare.bench.whale.request import WhaleJob
from wavemare.observe import Screen

__all__ = ["base_config", "in_turns", "limited", "tokens_of_step", "undisturbed"]


_Value = TypeVar("_Value")


def base_config(batch: Mapping[str, int], zero_stage: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration that all systems have in common.

    Args:
        batch: DeepSpeed's three batch sizes by their keys.
        zero_stage: Of ZeRO.
    """
    return {
        **batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": zero_stage},
        # Pipelines clip by default.
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }


def tokens_of_step(job: WhaleJob, step: int, micro_steps: int, samples: int) -> Tensor:
    """Return the samples of an optimizer step, equal on all ranks and for all systems.

    Args:
        job: Has the sizes.
        step: Its number.
        micro_steps: Of a step.
        samples: Of a micro-step, of all ranks.

    Returns:
        Tokens (micro_steps, samples, sequence).
    """
    generator = torch.Generator().manual_seed(SEED + step)
    shape = (micro_steps, samples, job.sequence)
    return torch.randint(0, job.vocabulary, shape, generator=generator)


@contextmanager
def limited(job: WhaleJob) -> Iterator[None]:
    """Let this process be the device that the job makes of it; all ranks must enter together."""
    rank, folder = dist.get_rank(), Path(job.folder)
    ask_for_share(folder, rank, job.devices[rank])
    dist.barrier()
    try:
        yield
    finally:
        ask_for_share(folder, rank, None)


def undisturbed(patience: Patience, step: Callable[[], _Value]) -> list[_Value]:
    """Run a step from a barrier on, again if other programs have disturbed it.

    Args:
        patience: Decides which steps count.
        step: What to run; all ranks must call together.

    Returns:
        What it has returned on each rank.
    """
    while True:
        dist.barrier()
        patience.begin()
        value = step()
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        if patience.accepts():
            return values


def in_turns(
    job: WhaleJob,
    screen: Screen,
    patience: Patience,
    steps: Mapping[str, Callable[[], _Value]],
) -> dict[str, list[list[_Value]]]:
    """Run all systems' steps in turns, on the devices of the job.

    Args:
        job: Says how many rounds.
        screen: Told of each.
        patience: Decides which steps count.
        steps: What to run, by system.

    Returns:
        What the steps have returned, by system, timed round and rank.
    """
    found: dict[str, list[list[_Value]]] = {name: [] for name in steps}
    with limited(job):
        for turn in range(job.warmups + job.rounds):
            screen.note(f"round {turn + 1} of {job.warmups + job.rounds}")
            for name in rotated(list(steps), turn):
                values = undisturbed(patience, steps[name])
                if turn >= job.warmups:
                    found[name].append(values)
    return found
