# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks planner``: shares, cuts, a probe of the cluster, or a trial."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import wavemare
from benchmarks.cluster.limits import ask
from benchmarks.pipeline.measure import run_round
from benchmarks.pipeline.systems import EngineRunner, record_engine
from benchmarks.planner.request import BASELINE, CUTS, PLANNED, SHARES, PlannerJob
from benchmarks.planner.run import cut_rows, share_rows
from benchmarks.ranks import SEED, build_gpt, interleaved
from wavemare.engine.launch.group import gather
from wavemare.models.timing import rank_times
from wavemare.observe import Screen
from wavemare.parallel.balance import balance_replicas, balance_stages, example_samples
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.planner.probe import BlockSize, probe_cluster
from wavemare.pipeline.plan.partition import balanced_cuts

_ALONE = "no-communication-bound"
_ZERO = 1
_CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 0.0,  # by default pipelines clip
    "steps_per_print": None,
}
_STEADY_STEPS = 2
_Value = TypeVar("_Value")


def measure(job: PlannerJob) -> dict[str, Any]:
    """Return the measurements of a job."""
    torch.set_num_threads(1)
    screen = Screen(rank=dist.get_rank())
    parts = {SHARES: _measure_shares, CUTS: _measure_cuts, "probe": _probe, "trial": _try_layout}
    return parts[job.part](job, screen)


@contextmanager
def _limited(job: PlannerJob) -> Iterator[None]:
    """Give this process its share of a core in the block; all ranks must enter together."""
    ask(job.devices[dist.get_rank()])
    dist.barrier()
    try:
        yield
    finally:
        ask(None)


def _in_turns(
    job: PlannerJob, screen: Screen, steps: Mapping[str, Callable[[], _Value]]
) -> dict[str, list[list[_Value]]]:
    """Run all systems' steps in turns; return their values by system, timed round and rank."""
    found: dict[str, list[list[_Value]]] = {name: [] for name in steps}
    with _limited(job):
        for timed, name in interleaved(job, list(steps), screen.note):
            dist.barrier()
            values = gather(steps[name]())
            if timed:
                found[name].append(values)
    return found


class _Trial:
    """A layout's engine, on this rank's micro-batches."""

    def __init__(self, job: PlannerJob, layout: Layout) -> None:
        config = layout.configure(_CONFIG)
        self.engine = wavemare.initialize(model=build_gpt(job), config=config)[0]
        self.batches = _own_batches(job, layout)
        self.losses: list[float] = []

    def step(self) -> float:
        """Train a step; return the seconds."""
        started = time.perf_counter()
        self.losses.append(float(self.engine.train_batch(self.batches)))
        return time.perf_counter() - started


def _own_batches(job: PlannerJob, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's micro-batches of all steps."""
    replica = dist.get_rank() // layout.tensor_parallel % layout.data_parallel
    before, own = sum(layout.shares[:replica]), layout.shares[replica]
    for step in itertools.count():
        for micro in _tokens(job, step, layout.micro_steps, sum(layout.shares)):
            part = micro[before : before + own]
            yield {"input_ids": part, "labels": part}


def _tokens(job: PlannerJob, step: int, micro_steps: int, samples: int) -> Tensor:
    """Return a step's tokens (micro_steps, samples, sequence), equal on all ranks."""
    generator = torch.Generator().manual_seed(SEED + step)
    shape = (micro_steps, samples, job.sequence)
    return torch.randint(0, job.vocabulary, shape, generator=generator)


# --- shares of samples ----------------------------------------------------------------------------


def _measure_shares(job: PlannerJob, screen: Screen) -> dict[str, Any]:
    model = build_gpt(job)
    batch = {
        "train_batch_size": job.batch * job.ranks * job.micro_steps,
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.micro_steps,
    }
    screen.note(f"measuring the speeds of {job.ranks} ranks")
    with _limited(job):
        layout = balance_replicas(
            model,
            lambda samples: example_samples(model, job.sequence, samples),
            batch,
            zero_stage=_ZERO,
            sequence_length=job.sequence,
        )
    assert layout.predicted is not None, "measured layouts have predictions"
    equal = replace(layout, shares=(job.batch,) * job.ranks)
    systems = {name: _Trial(job, own) for name, own in ((BASELINE, equal), (PLANNED, layout))}

    def alone() -> float:
        started = time.perf_counter()
        for tokens in _tokens(job, 0, job.micro_steps, job.batch):
            model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        return time.perf_counter() - started

    steps = {name: system.step for name, system in systems.items()}
    rounds = _in_turns(job, screen, {**steps, _ALONE: alone})
    for system in systems.values():
        system.engine.destroy()
    alone_s = [median(own) for own in zip(*rounds.pop(_ALONE), strict=True)]
    losses = {name: system.losses for name, system in systems.items()}
    shares = {BASELINE: equal.shares, PLANNED: layout.shares}
    predicted_s = layout.predicted.step_s
    rows = share_rows(job, shares, rounds, losses, alone_s=alone_s, predicted_s=predicted_s)
    return {"rows": rows}


# --- cuts of a pipeline ---------------------------------------------------------------------------


def _measure_cuts(job: PlannerJob, screen: Screen) -> dict[str, Any]:
    batch = {
        "train_batch_size": job.batch * job.micro_batches,
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.micro_batches,
    }
    screen.note(f"measuring the layers on {job.ranks} ranks")
    with _limited(job):
        table = rank_times(build_gpt(job), samples=job.batch, sequence_length=job.sequence)
    layout = balance_stages(table, batch, stages=job.ranks, schedule=job.schedule)
    assert layout.cuts is not None, "there are several stages"
    equal = balanced_cuts(table.mean(axis=0).tolist(), job.ranks)
    cuts = {BASELINE: tuple(equal), PLANNED: layout.cuts}
    runners = {name: _pipeline(job, replace(layout, cuts=own)) for name, own in cuts.items()}
    turns = {name: partial(_round, job, runner) for name, runner in runners.items()}
    measured = _in_turns(job, screen, turns)
    for runner in runners.values():
        runner.engine.destroy()
    rounds = {name: [[s for s, _ in ranks] for ranks in own] for name, own in measured.items()}
    stage_s = {
        name: [median(spent for _, spent in own) for own in zip(*measured[name], strict=True)]
        for name in cuts
    }
    return {"rows": cut_rows(job, cuts, rounds, stage_s, table.tolist())}


def _pipeline(job: PlannerJob, layout: Layout) -> EngineRunner:
    trial = _Trial(job, layout)
    batches = list(itertools.islice(trial.batches, job.micro_batches))
    return EngineRunner(trial.engine, batches, record_engine(trial.engine))


def _round(job: PlannerJob, runner: EngineRunner) -> tuple[float, float]:
    """Train some steps; return seconds of a step, and of a micro-batch's passes."""
    steps, fill = 1, 0
    if job.schedule == "pipemare":  # it is full before and after the timed steps
        steps, fill = _STEADY_STEPS, math.ceil(job.ranks / job.micro_batches)
    sample, _ = run_round(runner, steps, fill)
    assert sample.busy is not None, "engines note their actions"
    return sample.seconds, sample.busy.compute_s / job.micro_batches


# --- the planner's choice -------------------------------------------------------------------------


def _probe(job: PlannerJob, screen: Screen) -> dict[str, Any]:
    """Measure the devices and the links of all ranks; return the cluster as JSON text."""
    screen.note(f"probing {job.ranks} ranks")
    block = BlockSize(job.hidden, 4 * job.hidden, job.heads, job.sequence)
    with _limited(job):
        return {"cluster": probe_cluster(block).to_json()}


def _try_layout(job: PlannerJob, screen: Screen) -> dict[str, Any]:
    """Train by the job's layout; return the seconds of the slowest rank's rounds."""
    layout = Layout.from_json(job.layout)
    axes = f"{layout.stages} x {layout.tensor_parallel} x {layout.data_parallel}"
    screen.note(f"trying {axes}: stages x splits x replicas")
    trial = _Trial(job, layout)
    rounds = _in_turns(job, screen, {"trial": trial.step})["trial"]
    trial.engine.destroy()
    return {"rounds_s": [max(ranks) for ranks in rounds]}
