# SPDX-License-Identifier: Apache-2.0
"""Pipelines with a slow rank: cuts into equal work beside those that are made from speeds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

import wavemare
from wavemare.bench.engines import record_actions
from wavemare.bench.gpt import build_gpt
from wavemare.bench.recorder import busy_seconds
from wavemare.bench.runner import Place
from wavemare.bench.wave.disturbance import Patience
from wavemare.bench.whale.bounds import stage_seconds
from wavemare.bench.whale.report import CutsMeasured, cut_rows
from wavemare.bench.whale.request import BASELINE, PLANNED, WhaleJob
from wavemare.bench.whale.task import (
    base_config,
    in_turns,
    limited,
    tokens_of_step,
)
from wavemare.observe import Screen
from wavemare.parallel.planner.balance import measure_layers, plan_stages
from wavemare.parallel.planner.stages import equal_cuts

__all__ = ["measure_cuts"]

_STEADY = "pipemare"
_STEADY_STEPS = 2


def measure_cuts(job: WhaleJob, screen: Screen) -> dict[str, Any]:
    """Measure both systems; return the rows of the result."""
    batch = {
        "train_batch_size": job.batch * job.micro_batches,
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.micro_batches,
    }
    screen.note(f"measuring the layers on {job.ranks} ranks")
    with limited(job):
        table = measure_layers(build_gpt(job), samples=job.batch, sequence_length=job.sequence)
    plan = plan_stages(table, batch, stages=job.ranks, schedule=job.schedule)
    assert plan.cuts is not None, "there are several stages"
    assert plan.predicted is not None, "measured plans have predictions"
    cuts = {BASELINE: equal_cuts(table.mean(axis=0).tolist(), job.ranks), PLANNED: plan.cuts}
    systems = {name: _Pipeline(job, batch, own) for name, own in cuts.items()}
    patience = Patience(job.patience)
    steps = {name: system.round for name, system in systems.items()}
    rounds = in_turns(job, screen, patience, steps)
    for system in systems.values():
        system.engine.destroy()
    rows = cut_rows(
        job,
        CutsMeasured(
            cuts=cuts,
            table=table.tolist(),
            seconds={name: [[r.seconds for r in ranks] for ranks in rounds[name]] for name in cuts},
            compute_s={
                name: [[r.compute_s for r in ranks] for ranks in rounds[name]] for name in cuts
            },
            predicted={
                BASELINE: stage_seconds(table.tolist(), cuts[BASELINE]),
                PLANNED: plan.predicted.stage_s,
            },
            disturbed=patience.disturbed,
        ),
    )
    return {"rows": rows}


class _Round(NamedTuple):
    """What a rank measured.

    Args:
        seconds: Per optimizer step.
        compute_s: In passes, per micro-batch.
    """

    seconds: float
    compute_s: float


class _Pipeline:
    """An engine with certain cuts.

    Attributes:
        engine: DeepSpeed's or ours.
    """

    def __init__(self, job: WhaleJob, batch: dict[str, int], cuts: Sequence[int]) -> None:
        config = base_config(batch, 0)
        section = {"stages": job.ranks, "schedule": job.schedule, "partition": list(cuts[:-1])}
        config["wavemare"] = {"pipeline": section}
        self.engine = wavemare.initialize(model=build_gpt(job), config=config)[0]
        self._count = job.micro_batches
        # An asynchronous pipeline is filled before, and stays full until the others have done.
        fill = math.ceil(job.ranks / job.micro_batches)
        steady = job.schedule == _STEADY
        self._steps, self._lead, self._tail = (
            (_STEADY_STEPS, 1 + fill, fill) if steady else (1, 0, 0)
        )
        place = Place(dist.get_rank(), job.ranks, job.micro_batches)
        self._recorder = None if steady else record_actions(self.engine, place)
        if steady:
            self.engine.recorder.keeping = True
        tokens = tokens_of_step(job, 0, job.micro_batches, job.batch)
        self._batches = itertools.cycle([{"input_ids": part, "labels": part} for part in tokens])

    def round(self) -> _Round:
        """Train some steps; return what this rank measured."""
        self._train(self._lead)
        self._take()
        started = time.perf_counter()
        self._train(self._steps)
        seconds = (time.perf_counter() - started) / self._steps
        compute_s = busy_seconds(self._take()).compute_s / (self._steps * self._count)
        self._train(self._tail)
        if self._recorder is None:
            self.engine.drain()
        self._take()
        return _Round(seconds, compute_s)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.train_batch(self._batches)

    def _take(self) -> list[Any]:
        if self._recorder is not None:
            return self._recorder.take()
        recorder = self.engine.recorder
        events, recorder.events = recorder.events, []
        return list(events)
