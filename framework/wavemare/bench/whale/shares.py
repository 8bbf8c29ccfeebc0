# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks of unlike speed: equal shares beside those that are made from speeds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

import wavemare
from wavemare.bench.gpt import build_gpt
from wavemare.bench.wave.disturbance import Patience
from wavemare.bench.whale.report import SharesMeasured, share_rows
from wavemare.bench.whale.request import ALONE, BASELINE, PASSES, PLANNED, WhaleJob
from wavemare.bench.whale.task import (
    base_config,
    in_turns,
    limited,
    tokens_of_step,
)
from wavemare.observe import Screen
from wavemare.parallel.planner.balance import balance_replicas
from wavemare.parallel.planner.speed import example_samples

__all__ = ["measure_shares"]

_ZERO = 1


def measure_shares(job: WhaleJob, screen: Screen) -> dict[str, Any]:
    """Measure both systems; return the rows of the result.

    Raises:
        CommError: Losses differ by more than rounding.
    """
    model = build_gpt(job)
    batch = {
        "train_batch_size": job.batch * job.ranks * job.micro_steps,
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.micro_steps,
    }
    screen.note(f"measuring the speeds of {job.ranks} ranks")
    with limited(job):
        plan, speeds = balance_replicas(
            model,
            lambda samples: example_samples(model, job.sequence, samples),
            batch,
            zero_stage=_ZERO,
            sequence_length=job.sequence,
        )
    shares = {BASELINE: (job.batch,) * job.ranks, PLANNED: plan.shares}
    systems = {name: _Training(job, batch, own) for name, own in shares.items()}
    alone = {
        ALONE: _Alone(job, model, shares[BASELINE]),
        PASSES: _Alone(job, model, shares[PLANNED]),
    }
    patience = Patience(job.patience)
    runners: dict[str, _Training | _Alone] = {**systems, **alone}
    steps = {name: runner.step for name, runner in runners.items()}
    seconds = in_turns(job, screen, patience, steps)
    for system in systems.values():
        system.engine.destroy()
    assert plan.predicted is not None, "measured plans have predictions"
    rows = share_rows(
        job,
        SharesMeasured(
            shares=shares,
            seconds=seconds,
            losses={name: system.losses for name, system in systems.items()},
            predicted_s=plan.predicted.step_s,
            speeds=speeds,
            disturbed=patience.disturbed,
        ),
    )
    return {"rows": rows}


class _Training:
    """An engine with certain shares.

    Attributes:
        engine: DeepSpeed's.
        losses: Of the steps so far.
    """

    def __init__(self, job: WhaleJob, batch: dict[str, int], shares: Sequence[int]) -> None:
        self._job = job
        self._before = sum(shares[: dist.get_rank()])
        self._own = shares[dist.get_rank()]
        config = base_config(batch, _ZERO)
        config["wavemare"] = {"balance": {"shares": list(shares)}}
        self.engine = wavemare.initialize(model=build_gpt(job), config=config)[0]
        self.losses: list[float] = []

    def step(self) -> float:
        """Train on this rank's part of the next step's samples; return its seconds."""
        started = time.perf_counter()
        self.losses.append(float(self.engine.train_batch(self._parts())))
        return time.perf_counter() - started

    def _parts(self) -> Iterator[dict[str, Tensor]]:
        job = self._job
        for micro in tokens_of_step(job, len(self.losses), job.micro_steps, job.batch * job.ranks):
            tokens = micro[self._before : self._before + self._own]
            yield {"input_ids": tokens, "labels": tokens}


class _Alone:
    """The passes of certain shares, without engine, optimizer and messages."""

    def __init__(self, job: WhaleJob, model: Any, shares: Sequence[int]) -> None:
        self._job, self._model, self._own = job, model, shares[dist.get_rank()]

    def step(self) -> float:
        """Do them; return their seconds."""
        job, started = self._job, time.perf_counter()
        for tokens in tokens_of_step(job, 0, job.micro_steps, self._own):
            self._model(input_ids=tokens, labels=tokens).loss.backward()
        self._model.zero_grad()
        return time.perf_counter() - started
