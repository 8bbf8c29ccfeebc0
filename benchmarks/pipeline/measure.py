# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks pipeline``: build all systems, run all rounds, make the rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.pipeline.request import BASELINE, BOUND, SYSTEMS, PipelineRequest
from benchmarks.pipeline.systems import (
    BUILDERS,
    BoundRunner,
    Busy,
    Place,
    Runner,
    busy_seconds,
)
from benchmarks.pipeline.workloads import GRADIENT_CLIPPING, Workload, build_workload
from benchmarks.ranks import interleaved, ratio_row
from benchmarks.traces import save_traces
from wavemare.engine.launch.group import gather
from wavemare.models.timing import device_time
from wavemare.observe import Screen
from wavemare.pipeline.clock.simulate import Event

Key = tuple[str, int]
"""A system's name and a number of micro-batches."""
_CALIBRATION_MICRO_BATCHES = 4
_CALIBRATION_ROUNDS = 3
_IDLE_S = 1.0


class Sample(NamedTuple):
    """One round of one system on one rank.

    Args:
        seconds: Per optimizer step.
        cpu_s: Processor time of all threads per optimizer step.
        busy: By purpose; None if the actions of the system cannot be recorded.
    """

    seconds: float
    cpu_s: float
    busy: Busy | None = None


Samples = Mapping[Key, Sequence[Sequence[Sample]]]
"""For each system and number of micro-batches: for each timed round, a sample of each rank."""


def measure(request: PipelineRequest) -> dict[str, Any]:
    """Build all systems, run all rounds and return the result."""
    rank = dist.get_rank()
    screen = Screen(rank=rank)
    workload = build_workload(request)
    stage_s = _stage_seconds(workload, request)
    screen.note(f"stages: {', '.join(f'{1000 * seconds:.1f} ms' for seconds in stage_s)}")
    runners: dict[Key, Runner] = {}
    for name in (name for name in SYSTEMS if name in request.systems):
        screen.note(f"building {name}")
        for count in request.micro_batches:
            if request.obstacle(name, count) is None:
                runner = BUILDERS[name](workload, Place(rank, request.stages, count))
                workload.prepare(runner.optimizer)
                runners[name, count] = runner
    # Systems that are compared, at equal micro-batches, run close together.
    keys = sorted(runners, key=lambda key: key[1])
    samples: dict[Key, list[list[Sample]]] = defaultdict(list)
    last: dict[Key, list[Event]] = {}
    for timed, key in interleaved(request, keys, screen.note):
        steps, fill = request.steps(key[1]), request.fill(*key)
        sample, last[key] = run_round(runners[key], steps, fill)
        if timed:
            samples[key].append(gather(sample))
    idle_shares = gather(idle_share())
    if request.trace is not None:
        traces = {key: gather(events) for key, events in last.items()}
        if rank == 0:
            save_traces(
                request.trace,
                {(f"m{count}", f"{name}, M={count}"): e for (name, count), e in traces.items()},
            )
    return {
        "baseline": BASELINE,
        "stage_s": stage_s,
        "imbalance": max(stage_s) * len(stage_s) / sum(stage_s) - 1,
        "waits_s": request.waits._asdict() if request.synthetic else None,
        "idle_shares": idle_shares,
        "rows": build_rows(request, samples, idle_shares),
        "skipped": request.skipped(),
    }


def run_round(runner: Runner, steps: int, fill: int) -> tuple[Sample, list[Event]]:
    """Run a system's steps of one round; all ranks call together.

    Args:
        runner: The system.
        steps: Timed optimizer steps.
        fill: Steps before them that fill the pipeline, and after them.

    Returns:
        This rank's times, and its timed actions.
    """
    dist.barrier()
    for _ in range(1 + fill):
        runner.step()
    take = runner.take or list[Event]
    take()
    # No barrier here: in steady state the ranks are at different points of the same rate.
    started, cpu_started = device_time(), time.process_time()
    for _ in range(steps):
        runner.step()
    seconds, cpu_s = (device_time() - started) / steps, (time.process_time() - cpu_started) / steps
    events = take()
    for _ in range(fill):  # no rank computes beside an idle one
        runner.step()
    runner.drain()
    take()
    if runner.take is None:
        return Sample(seconds, cpu_s), []
    busy = Busy(*(total / steps for total in busy_seconds(events)))
    return Sample(seconds, cpu_s, busy), events


def idle_share() -> float:
    """Return the processor seconds per second of this rank while it sleeps; all ranks call it.

    The threads of all systems' process groups wake up all the time, whichever system runs.
    """
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    time.sleep(_IDLE_S)
    return (time.process_time() - cpu_started) / (time.perf_counter() - started)


def _stage_seconds(workload: Workload, request: PipelineRequest) -> list[float]:
    """Return each stage's seconds for one micro-batch, with all stages at work at once."""
    count = _CALIBRATION_MICRO_BATCHES
    runner = BoundRunner(workload, Place(dist.get_rank(), request.stages, count))
    samples = [
        run_round(runner, 1, request.fill(BOUND, count))[0] for _ in range(_CALIBRATION_ROUNDS)
    ]
    own = min(sample.busy.compute_s for sample in samples[1:] if sample.busy is not None)
    return [seconds / count for seconds in gather(own)]


def build_rows(
    request: PipelineRequest, samples: Samples, idle_shares: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the rows of the result, by number of micro-batches and then by system.

    Args:
        request: What was measured.
        samples: Of all systems.
        idle_shares: For each rank, see `idle_share`; the processor time is less by these.
    """
    slowest = {
        key: [max(sample.seconds for sample in ranks) for ranks in rounds]
        for key, rounds in samples.items()
    }
    rows = []
    for count in request.micro_batches:
        bound = slowest.get((BOUND, count))
        for name in (name for name in SYSTEMS if (name, count) in samples):
            ideal_of = SYSTEMS[name].ideal
            ideal = ideal_of(request.stages, count) if ideal_of else None
            timed = ratio_row(slowest[name, count], slowest.get((BASELINE, count)))
            own = timed["median_s"]
            cpu_rounds_s = [
                mean(
                    sample.cpu_s - share * sample.seconds
                    for sample, share in zip(ranks, idle_shares, strict=True)
                )
                for ranks in samples[name, count]
            ]
            row = {
                "system": name,
                "stages": request.stages,
                "micro_batches": count,
                **timed,
                "cpu_s": median(cpu_rounds_s),
                "cpu_rounds_s": cpu_rounds_s,
                "ideal": ideal,
                "bound_fraction": None if bound is None else median(bound) / own,
                "steps_per_round": request.steps(count),
                "gradient_clipping": GRADIENT_CLIPPING,
                **_shares(samples[name, count]),
            }
            if request.synthetic:
                row["utilisation"] = sum(request.waits) * count / own
                row["ideal_utilisation"] = ideal and ideal * count / (count + request.stages - 1)
            rows.append(row)
    return rows


def _shares(rounds: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Return each rank's medians, their mean share of busy time, and the busiest one's waiting."""
    if any(sample.busy is None for samples in rounds for sample in samples):
        return {"waiting": None, "busy": None, "ranks": None}
    ranks = [_rank_medians(samples) for samples in zip(*rounds, strict=True)]
    bottleneck = max(ranks, key=lambda rank: rank["compute_s"] + rank["step_s"])
    busy = [(rank["compute_s"] + rank["step_s"]) / rank["seconds"] for rank in ranks]
    return {
        "waiting": bottleneck["waiting_s"] / bottleneck["seconds"],
        "busy": sum(busy) / len(busy),
        "ranks": ranks,
    }


def _rank_medians(samples: Sequence[Sample]) -> dict[str, float]:
    known = [(sample.seconds, sample.busy) for sample in samples if sample.busy is not None]
    parts = {name: median(getattr(busy, name) for _, busy in known) for name in Busy._fields}
    return {
        "seconds": median(seconds for seconds, _ in known),
        "waiting_s": median(spent - busy.compute_s - busy.step_s for spent, busy in known),
        **parts,
    }
