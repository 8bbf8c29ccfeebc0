# SPDX-License-Identifier: Apache-2.0
"""The jobs of ``wavemare bench planner``: groups of ranks, one after the other."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from itertools import chain
from typing import Any

from wavemare.bench.cluster import EmulatedCluster
from wavemare.bench.cluster.limits import ADDRESS, Throttle, serving
from wavemare.bench.planner.request import BASELINE, HOSTS, ORDER, PlannerJob, PlannerRequest
from wavemare.bench.planner.rows import choice_rows
from wavemare.bench.ranks import build_gpt
from wavemare.bench.run import run_ranks
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.cluster import Cluster, parse_cluster
from wavemare.parallel.planner.model import ModelCosts, model_costs
from wavemare.parallel.planner.predict import Candidate, Scene, Settings
from wavemare.parallel.planner.proposals import (
    equal_layouts,
    unlike_layouts,
    variants,
    whole_micro_steps,
)

Axes = tuple[int, int, int]
"""Stages, ranks that share each layer, and replicas."""
_NUM_HOSTS = 2


def run_jobs(request: PlannerRequest) -> dict[str, Any]:
    """Run all jobs to their end and return their rows.

    Raises:
        LaunchError: There are no CPU quotas or no emulated hosts here, or a rank failed.
    """
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    cores = len(os.sched_getaffinity(0))
    with Throttle() as throttle, serving(throttle.limit) as address:
        for job in request.jobs(cores):
            found = run_ranks(job, environment={ADDRESS: address})
            rows += found["rows"]
        for name, job in request.cluster_jobs(cores):
            hosts = EmulatedCluster(_NUM_HOSTS, request.mbit) if name == HOSTS else nullcontext()
            with hosts as cluster:
                found = _choose(name, job, address, cluster)
            rows += found["rows"]
    return {
        "machine": found["machine"],
        "baseline": BASELINE,
        "throttle": throttle.way,
        "request": request.model_dump(),
        "rows": rows,
    }


def _choose(
    name: str, job: PlannerJob, address: str, hosts: EmulatedCluster | None
) -> dict[str, Any]:
    """Probe a cluster, and try the best layout of all axes; return machine and rows."""
    devices = range(job.ranks)
    cluster = parse_cluster(json.loads(_run(job, address, hosts, devices)["cluster"]))
    model = build_gpt(job)
    costs = model_costs(model.config, job.sequence, head=type(model).__name__)
    settings = Settings(
        global_batch=job.batch * job.micro_steps * job.ranks,
        zero_stages=(0, 1),
        recompute=False,
    )
    layouts = layouts_by_axes(costs, cluster, settings)
    found = []
    for layout in layouts.values():
        trial = job.model_copy(update={"part": "trial", "layout": layout.to_json()})
        found.append(_run(trial, address, hosts, layout.order or devices))
    rows = choice_rows(job, name, list(layouts.values()), [each["rounds_s"] for each in found])
    return {"machine": found[-1]["machine"], "rows": rows}


def _run(job: PlannerJob, address: str, hosts: EmulatedCluster | None, order: Any) -> Any:
    """Run a job; ``order[rank]`` is the device that runs a rank."""
    own = tuple(job.devices[device] for device in order)
    job = job.model_copy(update={"devices": own})
    environment = {ADDRESS: address}
    if hosts is None:
        return run_ranks(job, environment=environment)
    per_host = job.ranks // _NUM_HOSTS
    environment |= {
        "MASTER_ADDR": f"node{order[0] // per_host}",
        ORDER: ",".join(map(str, order)),
    }
    return run_ranks(job, cluster=hosts, ranks_per_host=per_host, environment=environment)


def layouts_by_axes(costs: ModelCosts, cluster: Cluster, settings: Settings) -> dict[Axes, Layout]:
    """Return the layout with the shortest predicted step for all legal axes, the best one first.

    `planner.plan` leaves out axes that cannot be among the best, and this does not.
    """
    scene = Scene(costs, cluster, settings)
    best: dict[Axes, tuple[float, Candidate, Prediction]] = {}
    for variant in variants(scene):
        axes = (variant.stages, variant.tensor_parallel, variant.data_parallel)
        for micro_steps in whole_micro_steps(scene, variant.data_parallel):
            for candidate in chain(
                equal_layouts(scene, variant, micro_steps),
                unlike_layouts(scene, variant, micro_steps, float("inf")),
            ):
                predicted = scene.predict(candidate)
                if predicted and (axes not in best or predicted.step_s < best[axes][0]):
                    best[axes] = predicted.step_s, candidate, predicted
    ordered = sorted(best.items(), key=lambda entry: entry[1][0])
    return {axes: scene.plan(candidate, predicted) for axes, (_, candidate, predicted) in ordered}
