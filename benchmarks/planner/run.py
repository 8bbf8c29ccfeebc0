# SPDX-License-Identifier: Apache-2.0
"""The jobs of ``benchmarks planner``, one after the other, and their rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import chain, combinations
from statistics import median
from typing import Any

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.limits import ADDRESS, Throttle, serving
from benchmarks.planner.request import (
    BASELINE,
    CHOICE,
    CUTS,
    HOSTS,
    ORDER,
    PLANNED,
    SHARES,
    PlannerJob,
    PlannerRequest,
)
from benchmarks.ranks import build_gpt, ratio_row
from benchmarks.run import run_ranks
from wavemare.errors import CommError
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
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.orders import one_f_one_b

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

    `planner.find_layouts` leaves out axes that cannot be among the best, and this does not.
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
    return {axes: scene.layout(candidate, predicted) for axes, (_, candidate, predicted) in ordered}


LOSS_TOLERANCE = 1e-6
"""Losses of the same global batches may differ by so much."""
_FORWARD = 1 / 3
_plan = cache(one_f_one_b)

Rounds = Mapping[str, Sequence[Sequence[float]]]
"""For each system and round: the seconds of each rank."""


def share_rows(
    job: PlannerJob,
    shares: Mapping[str, Sequence[int]],
    rounds: Rounds,
    losses: Mapping[str, Sequence[float]],
    *,
    alone_s: Sequence[float],
    predicted_s: float,
) -> list[dict[str, Any]]:
    """Return a row for equal shares and one for planned shares.

    Args:
        job: Has the devices.
        shares: Samples of each rank in a micro-step, for each system.
        rounds: Of both systems.
        losses: Of all steps of each system.
        alone_s: Each rank's passes of equal shares, without messages.
        predicted_s: Seconds of a step with planned shares, before gradients are reduced.

    Raises:
        CommError: Losses differ by more than `LOSS_TOLERANCE`.
    """
    pairs = zip(losses[BASELINE], losses[PLANNED], strict=True)
    gaps = [abs(before - own) for before, own in pairs]
    gap = max(gaps)
    if not all(each <= LOSS_TOLERANCE for each in gaps):  # NaN is not
        reason = f"its losses are off by {gap:g}"
        raise CommError("system", PLANNED, reason, "Report this: its measurements mean nothing")
    return [
        {
            **_row(SHARES, name, job, rounds, share_gain(alone_s)),
            "shares": list(shares[name]),
            "predicted_s": predicted_s if name == PLANNED else None,
            "alone_s": list(alone_s),
            "loss_gap": gap,
            "losses": list(losses[name]),
        }
        for name in (BASELINE, PLANNED)
    ]


def cut_rows(
    job: PlannerJob,
    cuts: Mapping[str, Sequence[int]],
    rounds: Rounds,
    stage_s: Mapping[str, Sequence[float]],
    table: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """Return a row for equal cuts and one for planned cuts.

    Args:
        job: Has devices and schedule.
        cuts: Bounds of the stages, for each system.
        rounds: Of both systems.
        stage_s: Measured seconds of each stage's passes of a micro-batch, for each system.
        table: (stages, layers): measured seconds of a micro-batch on each stage's device.
    """
    count, schedule = job.micro_batches, job.schedule
    equal_s = cut_step_s(_stage_seconds(table, cuts[BASELINE]), count, schedule)
    best, best_s = best_cut(table, count, schedule)
    rows = []
    for name in (BASELINE, PLANNED):
        predicted = _stage_seconds(table, cuts[name])
        errors = [p / m - 1 for p, m in zip(predicted, stage_s[name], strict=True)]
        slow = job.devices.index(min(job.devices))
        row = _row(f"{schedule}, rank {slow} slow", name, job, rounds, equal_s / best_s)
        row |= {
            "part": CUTS,
            "schedule": schedule,
            "slow": slow,
            "micro_batches": count,
            "cuts": list(cuts[name]),
            "best_cuts": list(best),
            "predicted_s": cut_step_s(predicted, count, schedule),
            "stage_s": list(stage_s[name]),
            "predicted_stage_s": predicted,
            "stage_error": max(map(abs, errors)),
            "table": [list(line) for line in table],
        }
        rows.append(row)
    return rows


def choice_rows(
    job: PlannerJob,
    cluster: str,
    layouts: Sequence[Layout],
    rounds_s: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """Return a row for each layout, the planner's choice first; ratios are to the fastest one."""
    fastest = min(rounds_s, key=median)
    rows = []
    for place, (layout, own) in enumerate(zip(layouts, rounds_s, strict=True)):
        assert layout.predicted is not None, "layouts of a search have predictions"
        timed = ratio_row(own, fastest)
        rows.append(
            {
                "part": CHOICE,
                "case": f"choice, {cluster}",
                "system": f"{layout.stages}x{layout.tensor_parallel}x{layout.data_parallel}",
                "cluster": cluster,
                "ranks": job.ranks,
                "devices": list(job.devices),
                "chosen": place == 0,
                **timed,
                "ideal": 1.0,
                "bound_fraction": timed["ratio"],
                "predicted_s": layout.predicted.step_s,
                "error": layout.predicted.step_s / timed["median_s"] - 1,
                "cuts": None if layout.cuts is None else list(layout.cuts),
                "shares": list(layout.shares),
                "micro_steps": layout.micro_steps,
                "zero_stage": layout.zero_stage,
                "order": None if layout.order is None else list(layout.order),
            }
        )
    return rows


def _row(case: str, name: str, job: PlannerJob, rounds: Rounds, ideal: float) -> dict[str, Any]:
    slowest = {system: [max(ranks) for ranks in rounds[system]] for system in rounds}
    timed = ratio_row(slowest[name], slowest[BASELINE])
    own = ideal if name == PLANNED else 1.0
    return {
        "part": job.part,
        "case": f"{case}, {job.ranks} ranks",
        "system": name,
        "ranks": job.ranks,
        "devices": list(job.devices),
        **timed,
        "ideal": own,
        "bound_fraction": timed["ratio"] / own,
    }


def share_gain(seconds: Sequence[float]) -> float:
    """Return the gain of shares in proportion to speed over equal shares.

    ``sum(s) / (N min(s))`` for speeds ``s``; (1 + rho) / 2 for as many fast ranks as slow ones, of
    which the fast are rho times as fast (Whale's bound for two types).

    Args:
        seconds: Of each rank for the same work.
    """
    speeds = [1 / spent for spent in seconds]
    return sum(speeds) / (len(speeds) * min(speeds))


def cut_step_s(stage_s: Sequence[float], micro_batches: int, schedule: str) -> float:
    """Return a pipeline step's seconds without messages.

    Args:
        stage_s: Of each stage for a micro-batch, a third of it forward.
        micro_batches: Of a step.
        schedule: ``1f1b``, which is simulated, or ``pipemare``, which takes the slowest stage's
            time for each micro-batch.
    """
    if schedule == "pipemare":
        return micro_batches * max(stage_s)
    costs = Costs(
        forward_s=tuple(spent * _FORWARD for spent in stage_s),
        backward_s=tuple(spent * (1 - _FORWARD) for spent in stage_s),
    )
    timeline = simulate(_plan(len(stage_s), micro_batches), costs)
    return max(events[-1].end_s for events in timeline.ranks)


def best_cut(
    table: Sequence[Sequence[float]], micro_batches: int, schedule: str
) -> tuple[tuple[int, ...], float]:
    """Return the bounds of the best of all cuts, and the seconds of its step.

    Args:
        table: (stages, layers): seconds of a micro-batch on each stage's device.
        micro_batches: Of a step.
        schedule: ``1f1b`` or ``pipemare``.
    """
    stages, layers = len(table), len(table[0])
    found = []
    for inner in combinations(range(1, layers), stages - 1):
        bounds = (0, *inner, layers)
        step_s = cut_step_s(_stage_seconds(table, bounds), micro_batches, schedule)
        found.append((step_s, bounds))
    step_s, best = min(found)
    return best, step_s


def _stage_seconds(table: Sequence[Sequence[float]], bounds: Sequence[int]) -> list[float]:
    spans = zip(table, bounds, bounds[1:], strict=False)
    return [sum(row[first:end]) for row, first, end in spans]
