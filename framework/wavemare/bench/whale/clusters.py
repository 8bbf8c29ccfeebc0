# SPDX-License-Identifier: Apache-2.0
"""The clusters that the planner is tried on, and the trials of all that it could choose."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from wavemare.bench import launch
from wavemare.bench.gpt import build_gpt
from wavemare.bench.network import Laboratory
from wavemare.bench.share_requests import shares_on_demand
from wavemare.bench.throttle import Throttle
from wavemare.bench.whale.candidates import plans_by_axes
from wavemare.bench.whale.places import ORDER
from wavemare.bench.whale.report import choice_rows
from wavemare.bench.whale.request import HOSTS, PROBE, TRIAL, WhaleJob, WhaleRequest
from wavemare.parallel.planner.chains import model_costs
from wavemare.parallel.planner.cluster_file import parse_cluster
from wavemare.parallel.planner.predict import Settings

__all__ = ["WORKER", "Place", "measure_choice"]

WORKER = "wavemare.bench.whale.worker"
_NUM_HOSTS = 2


@dataclass
class Place:
    """Where ranks run: on this machine, or on the hosts of a laboratory.

    Args:
        throttle: Makes unlike devices of them.
        laboratory: None for this machine.
    """

    throttle: Throttle
    laboratory: Laboratory | None = None

    def run(self, job: WhaleJob, order: Sequence[int] | None = None) -> dict[str, Any]:
        """Run a job to its end and return what it has measured.

        Args:
            job: `devices` in the order of the cluster.
            order: ``order[rank]`` is the device of the cluster that runs the rank.
        """
        order = order or range(job.ranks)
        job = replace(job, devices=tuple(job.devices[device] for device in order))
        if self.laboratory is None:
            with shares_on_demand(self.throttle) as folder:
                return launch.measure(replace(job, folder=str(folder)), WORKER)
        return self._run_on_hosts(self.laboratory, job, order)

    def _run_on_hosts(
        self, laboratory: Laboratory, job: WhaleJob, order: Sequence[int]
    ) -> dict[str, Any]:
        per_host = job.ranks // _NUM_HOSTS

        def pids() -> dict[int, int]:
            started = laboratory.rank_pids()
            return {rank: started[device] for rank, device in enumerate(order)}

        with shares_on_demand(self.throttle, pids) as folder:
            return launch.measure_on_hosts(
                laboratory,
                replace(job, folder=str(folder)),
                WORKER,
                ranks_per_host=per_host,
                environment={
                    "MASTER_ADDR": f"node{order[0] // per_host}",
                    ORDER: ",".join(map(str, order)),
                },
            )


def measure_choice(request: WhaleRequest, throttle: Throttle, cores: int) -> dict[str, Any]:
    """Probe each cluster, and try the best plan for all axes; return machine and rows."""
    rows: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for name, job in request.cluster_jobs(cores):
        with _place(throttle, name, request.mbit) as place:
            cluster = parse_cluster(json.loads(place.run(replace(job, part=PROBE))["cluster"]))
            model = build_gpt(job)
            costs = model_costs(model.config, job.sequence, head=type(model).__name__)
            settings = Settings(
                global_batch=job.batch * job.micro_steps * job.ranks,
                zero_stages=(0, 1),
                waves=False,
                recompute=False,
            )
            plans = plans_by_axes(costs, cluster, settings)
            found = []
            for plan in plans.values():
                trial = replace(job, part=TRIAL, plan=plan.to_json())
                found.append(place.run(trial, plan.order))
            machine = found[-1]["machine"]
            rows += choice_rows(job, name, list(plans.values()), found)
    return {"machine": machine, "rows": rows}


@contextmanager
def _place(throttle: Throttle, cluster: str, mbit: float) -> Iterator[Place]:
    if cluster != HOSTS:
        yield Place(throttle)
        return
    with Laboratory(_NUM_HOSTS, mbit) as laboratory:
        yield Place(throttle, laboratory)
