# SPDX-License-Identifier: Apache-2.0
"""Clusters one after the other: measure the links, search, measure the layouts."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import EmulatedCluster
from benchmarks.layouts.clusters import CLUSTERS, Emulated
from benchmarks.layouts.metis import metis_layout
from benchmarks.layouts.request import CHOSEN, EQUAL, METIS, LayoutsRequest
from benchmarks.ranks import build_gpt
from wavemare.errors import LaunchError
from wavemare.files import atomic_write_text
from wavemare.observe.run import describe_machine
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.planner.cluster import Link
from wavemare.parallel.planner.model import ModelCosts, model_costs
from wavemare.parallel.planner.predict import Scene, Settings
from wavemare.parallel.planner.search import search_layouts

_ROOT = str(Path(__file__).parents[2])
_PROGRAM = [sys.executable, "-m", "benchmarks.layouts.device"]
_TERA = 1e12
_PORT = 29600
_END_S = 20.0


def measure_clusters(request: LayoutsRequest) -> dict[str, Any]:
    """Return the rows of all clusters.

    Raises:
        LaunchError: There are no emulated hosts here, or the ranks of a layout failed.
    """
    model = build_gpt(request)
    costs = model_costs(model.config, request.sequence, dtype="fp32", head=type(model).__name__)
    rows: list[dict[str, Any]] = []
    loads = []
    for name in request.clusters:
        loads.append(os.getloadavg()[0])
        rows += _measure(request, name, CLUSTERS[name], costs)
        for row in rows:
            if row["cluster"] == name:
                print(_line(row), flush=True)
    return {
        "machine": describe_machine(),
        "baseline": EQUAL,
        "request": request.model_dump(),
        "loads": loads,
        "rows": rows,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['cluster']}: {row['system']} {row['axes']} {row['cuts']} {row['shares']} "
        f"{row['other']} predicted {row['predicted_s']:.3f} measured {row['median_s']:.3f}"
    )


def _measure(
    request: LayoutsRequest, name: str, emulated: Emulated, costs: ModelCosts
) -> list[dict[str, Any]]:
    with EmulatedCluster(len(emulated.hosts)) as hosts, ExitStack() as stack:
        for host, mbit in enumerate(emulated.mbit or ()):
            hosts.shape(mbit, [host])
        devices = range(len(emulated.speeds))
        pairs = _pairs(emulated)
        probe = {"order": list(devices), "pairs": [pair for _, pair in pairs]}
        ranks = stack.enter_context(_Devices(request, hosts, emulated))
        found = ranks.run([probe])[0]["links"]
        links = {key: Link(*own) for (key, _), own in zip(pairs, found, strict=True)}
        flops = next(layer.flops for layer in costs.layers if layer.is_block)
        tflops = flops / (request.block_ms / 1e3) / _TERA
        cluster = emulated.describe(tflops, links, costs.parameters, request.overhead_ms / 1e3)
        settings = Settings(
            global_batch=request.batch,
            margin=0.0,
            recompute=False,
            zero_stages=(0,),
            max_tensor_parallel=1,
            keep=request.keep,
        )
        search = search_layouts(costs, cluster, settings)
        scene = Scene(costs, cluster, settings)
        other = metis_layout(scene)
        predicted = scene.predict(other)
        assert predicted is not None, "memory bounds nothing here"
        layouts = {CHOSEN: search.best}
        layouts |= {f"{n}.": layout for n, layout in enumerate(search.layouts[1:], 2)}
        layouts[METIS] = scene.layout(other, predicted)
        if search.equal is not None:
            layouts[EQUAL] = search.equal
        distinct = {layout.digest: layout for layout in layouts.values()}
        trials = [
            {
                "layout": json.loads(layout.to_json()),
                "order": list(layout.order or range(layout.world_size)),
            }
            for layout in distinct.values()
        ]
        measured = ranks.run(trials)
    rounds = {key: own["rounds_s"] for key, own in zip(distinct, measured, strict=True)}
    best = min(median(own) for own in rounds.values())
    told = {" - ".join(key): [own.alpha_s, own.bytes_s] for key, own in links.items()}
    return [
        _row(name, emulated, system, layout, rounds[layout.digest], best) | {"links": told}
        for system, layout in layouts.items()
    ]


def _pairs(emulated: Emulated) -> list[tuple[tuple[str, str], tuple[int, int]]]:
    """Return the names of two nodes, and a device on each, for each link that there is."""
    by_host: dict[int, list[int]] = {}
    for device in range(len(emulated.speeds)):
        by_host.setdefault(emulated.host(device), []).append(device)
    found = [
        ((f"node{a}", f"node{b}"), (by_host[a][0], by_host[b][0]))
        for a, b in combinations(by_host, 2)
    ]
    for host, own in by_host.items():
        if len(own) > 1:
            found.append(((f"node{host}", f"node{host}"), (own[0], own[1])))
    return found


class _Devices:
    """The processes of a cluster's devices, which run jobs of trials until the block ends.

    Args:
        request: Has the sizes.
        hosts: Open.
        emulated: The cluster.
    """

    def __init__(self, request: LayoutsRequest, hosts: EmulatedCluster, emulated: Emulated) -> None:
        self._request, self._hosts, self._emulated = request, hosts, emulated
        self._jobs = self._trials = 0
        self._open = ExitStack()

    def __enter__(self) -> _Devices:
        made = tempfile.TemporaryDirectory(prefix="wavemare-layouts-")
        self._folder = Path(self._open.enter_context(made))
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        self._ranks = self._hosts.start_ranks(
            [*_PROGRAM, str(self._folder)],
            ranks_per_host=self._emulated.ranks_per_host,
            environment={"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        )
        self._open.callback(self._ranks.kill)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._ask([])
                self._ranks.wait(_END_S)
        finally:
            self._open.close()

    def run(self, trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run trials one after the other; return what rank 0 of each has found.

        Raises:
            LaunchError: A trial left no result in time.
        """
        number = self._ask(trials)
        answers = [self._folder / f"trial-{number}-{place}.json" for place in range(len(trials))]
        for trial, answer in zip(trials, answers, strict=True):
            end = time.monotonic() + self._request.timeout_s
            while not answer.exists():
                if time.monotonic() > end:
                    logs = sorted(self._ranks_folder.glob("rank_*.log"))
                    tails = " ".join(" ".join(log.read_text().split()[-40:]) for log in logs)
                    reason = f"its ranks left no result in time; they said: {tails[-2000:]}"
                    remedy = "Give more --timeout-s, or mend that"
                    raise LaunchError("trial", trial.get("layout"), reason, remedy)
                time.sleep(0.05)
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]

    @property
    def _ranks_folder(self) -> Path:
        return self._hosts.folder / "job1"

    def _ask(self, trials: Sequence[dict[str, Any]]) -> int:
        """Write the next job; one without trials ends the processes."""
        sizes, own = ("layers", "hidden", "heads", "vocabulary", "sequence"), self._request
        asked = []
        for trial in trials:
            meet = f"node{self._emulated.host(trial['order'][0])}"
            asked.append({**trial, "meet": meet, "port": _PORT + self._trials})
            self._trials += 1
        job = {
            "processes": self._emulated.processes,
            "speeds": self._emulated.speeds,
            "block_s": own.block_ms / 1e3,
            "overhead_s": own.overhead_ms / 1e3,
            "model": {key: getattr(own, key) for key in sizes},
            "warmups": own.warmups,
            "rounds": own.rounds,
            "timeout_s": own.timeout_s,
            "trials": asked,
        }
        number, self._jobs = self._jobs, self._jobs + 1
        atomic_write_text(self._folder / f"job-{number}.json", json.dumps(job))
        return number


def _row(
    name: str,
    emulated: Emulated,
    system: str,
    layout: Layout,
    rounds_s: Sequence[float],
    best_s: float,
) -> dict[str, Any]:
    assert layout.predicted is not None, "layouts of a search have predictions"
    own, predicted_s = median(rounds_s), layout.predicted.step_s
    unused = len(emulated.speeds) - layout.world_size
    other = [f"slack {layout.slack}"] * (layout.slack > 0)
    other += [f"{unused} left out"] * (unused > 0)
    rows = layout.replica_cuts or ((layout.cuts,) if layout.cuts else ())
    return {
        "cluster": name,
        "system": system,
        "ranks": len(emulated.speeds),
        "hosts": [list(speeds) for speeds in emulated.hosts],
        "mbit": None if emulated.mbit is None else list(emulated.mbit),
        "axes": f"{layout.stages} x {layout.data_parallel}",
        "cuts": " | ".join(",".join(map(str, bounds[1:-1])) for bounds in rows) or "-",
        "shares": f"{layout.micro_steps} x {'/'.join(map(str, layout.shares))}",
        "order": list(layout.order or range(layout.world_size)),
        "other": ", ".join(other) or "-",
        "unlike": layout.replica_cuts is not None or not layout.balanced or unused > 0,
        "predicted_s": predicted_s,
        "median_s": own,
        "rounds_s": list(rounds_s),
        "error": predicted_s / own - 1,
        "ratio": best_s / own,
        "of_best": best_s / own,
    }
