# SPDX-License-Identifier: Apache-2.0
"""One rank of ``wavemare bench pipeline``: started by a launcher, told by a file what to measure.

::

    deepspeed --num_gpus 2 --module wavemare.bench.worker --request FILE --result FILE
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wavemare.bench.answer import answer
from wavemare.bench.engines import (
    build_dualpipev,
    build_one_f_one_b,
    build_pipemare,
    build_soap,
)
from wavemare.bench.report import Sample, build_rows, skipped
from wavemare.bench.request import PipelineRequest
from wavemare.bench.rounds import Key, Round, run_rounds
from wavemare.bench.runner import BoundRunner, Place, Runner
from wavemare.bench.systems import BASELINE, BOUND, SYSTEMS
from wavemare.bench.torch_schedules import build_torch_one_f_one_b, build_zbv
from wavemare.bench.trace import draw_timelines, save_timelines
from wavemare.bench.workload import Workload, build_workload
from wavemare.engine.launch.group import environment_rank
from wavemare.failure import run_main
from wavemare.observe import Screen
from wavemare.observe.formats import format_duration

__all__ = ["main"]

BUILDERS: dict[str, Callable[[Workload, Place], Runner]] = {
    BASELINE: build_one_f_one_b,
    "deepspeed-dualpipev": build_dualpipev,
    "torch-1f1b": build_torch_one_f_one_b,
    "torch-zbv": build_zbv,
    "wavemare-pipemare": build_pipemare,
    "wavemare-pipemare-slack": partial(build_pipemare, slack=1),
    "wavemare-pipemare-auto": partial(build_pipemare, optimizer_policy="auto"),
    "wavemare-pipemare-unguarded": partial(build_pipemare, guard={"nonfinite": "off"}),
    "wavemare-1f1b-soap": build_soap,
    BOUND: BoundRunner,
}


_CALIBRATION_MICRO_BATCHES = 4


def main() -> None:
    """Measure what the request asks for; rank 0 leaves the result."""
    answer(PipelineRequest, measure)


def measure(request: PipelineRequest) -> dict[str, Any]:
    """Build all systems, run all rounds and gather what the ranks measured.

    Args:
        request: What to measure; one process for each stage.

    Returns:
        The result, complete on rank 0 alone.
    """
    screen = Screen(rank=environment_rank())
    workload = build_workload(request)
    stages = _stage_seconds(workload, request)
    screen.note(f"stages: {', '.join(f'{1000 * seconds:.1f} ms' for seconds in stages)}")
    runners = _build(request, workload, screen)
    started = time.monotonic()

    def show(turn: int) -> None:
        left = ""
        if turn > 1:
            elapsed = time.monotonic() - started
            left = f", {format_duration(elapsed / turn * (request.rounds + 1 - turn))} left"
        screen.note(f"round {turn}/{request.rounds}{left}" if turn else "warming up")

    samples: dict[Key, list[list[Sample]]] = defaultdict(list)
    last: dict[Key, Round] = {}
    for key, measured in run_rounds(request, runners, show):
        samples[key].append(_gather(measured.sample))
        last[key] = measured
    if request.trace is not None:
        folder = Path(request.trace)
        for (name, count), measured in last.items():
            save_timelines(folder, name, count, _gather(measured.events), environment_rank())
        if environment_rank() == 0:
            for count in request.micro_batches:
                draw_timelines(folder, request.systems, count)
    return {
        "baseline": BASELINE,
        "stage_s": stages,
        "imbalance": max(stages) * len(stages) / sum(stages) - 1,
        "rows": build_rows(request, samples),
        "skipped": skipped(request),
    }


def _build(request: PipelineRequest, workload: Workload, screen: Screen) -> dict[Key, Runner]:
    runners = {}
    for name in (name for name in SYSTEMS if name in request.systems):
        screen.note(f"building {name}")
        for count in request.micro_batches:
            if request.obstacle(name, count) is None:
                place = Place(environment_rank(), request.stages, count)
                runners[name, count] = BUILDERS[name](workload, place)
    # What is compared with each other, at equal micro-batches, runs close together.
    return dict(sorted(runners.items(), key=lambda item: item[0][1]))


def _stage_seconds(workload: Workload, request: PipelineRequest) -> list[float]:
    """Return each stage's seconds for one micro-batch, with all stages at work at once."""
    count = _CALIBRATION_MICRO_BATCHES
    runner = BoundRunner(workload, Place(environment_rank(), request.stages, count))
    trial = replace(request, rounds=2, steps_per_round=1, micro_batches=(count,))
    rounds = [r.sample for _, r in run_rounds(trial, {(BOUND, count): runner}, lambda turn: None)]
    own = min(sample.busy.compute_s for sample in rounds if sample.busy is not None)
    return [seconds / count for seconds in _gather(own)]


def _gather(value: Any) -> list[Any]:
    """Return every rank's value, on every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    run_main(main)
