# SPDX-License-Identifier: Apache-2.0
"""What the planner chooses for a cluster: a rank's side of probing it, and of trying a plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

import wavemare
from wavemare.bench.gpt import build_gpt
from wavemare.bench.wave.disturbance import Patience
from wavemare.bench.whale.request import WhaleJob
from wavemare.bench.whale.task import (
    base_config,
    limited,
    tokens_of_step,
    undisturbed,
)
from wavemare.observe import Screen
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.planner.probe import BlockSize, probe_cluster

__all__ = ["probe", "try_plan"]


def probe(job: WhaleJob, screen: Screen) -> dict[str, Any]:
    """Measure the devices and the links of all ranks; return the cluster as JSON text."""
    screen.note(f"probing {job.ranks} ranks")
    block = BlockSize(job.hidden, 4 * job.hidden, job.heads, job.sequence)
    with limited(job):
        return {"cluster": probe_cluster(block).to_json()}


def try_plan(job: WhaleJob, screen: Screen) -> dict[str, Any]:
    """Train by the job's plan; return the seconds of each step of the slowest rank."""
    plan = Layout.from_json(job.plan)
    axes = f"{plan.stages} x {plan.tensor_parallel} x {plan.data_parallel}"
    screen.note(f"trying {axes}: stages x splits x replicas")
    config = plan.configure(base_config({}, plan.zero_stage))
    engine = wavemare.initialize(model=build_gpt(job), config=config)[0]
    batches = _own_batches(job, plan)
    patience = Patience(job.patience)

    def step() -> float:
        started = time.perf_counter()
        engine.train_batch(batches)
        return time.perf_counter() - started

    with limited(job):
        steps = [max(undisturbed(patience, step)) for _ in range(job.warmups + job.rounds)]
    engine.destroy()
    return {"rounds_s": steps[job.warmups :], "disturbed": patience.disturbed}


def _own_batches(job: WhaleJob, plan: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's micro-batches of all steps."""
    replica = dist.get_rank() // plan.tensor_parallel % plan.data_parallel
    before, own = sum(plan.shares[:replica]), plan.shares[replica]
    tokens = tokens_of_step(job, 0, plan.micro_steps, sum(plan.shares))
    while True:
        for micro in tokens:
            part = micro[before : before + own]
            yield {"input_ids": part, "labels": part}
