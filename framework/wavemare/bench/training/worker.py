# SPDX-License-Identifier: Apache-2.0
"""One rank of ``wavemare bench training``: started by ``mpirun``, asked by a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wavemare.bench.answer import answer
from wavemare.bench.rounds import rotated
from wavemare.bench.training.quality import Curve, train
from wavemare.bench.training.report import Sample, build_quality, build_result
from wavemare.bench.training.request import TrainingRequest
from wavemare.bench.training.systems import System, build_system
from wavemare.bench.training.task import Task, make_task
from wavemare.failure import run_main
from wavemare.observe import Screen

__all__ = ["main"]

_LINK_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    """Measure what the request asks for; rank 0 leaves the result."""
    answer(TrainingRequest, measure)


def measure(request: TrainingRequest) -> dict[str, Any]:
    """Measure times, or compare losses, and return the result of rank 0."""
    torch.set_num_threads(1)
    screen = Screen(rank=dist.get_rank())
    task = make_task(request)
    if request.quality_steps is None:
        return _time(request, task, screen)
    return _train(request, task, screen)


def _time(request: TrainingRequest, task: Task, screen: Screen) -> dict[str, Any]:
    """Run all rounds; the systems take turns in an order that rotates."""
    systems = {}
    for name in request.systems:
        screen.note(f"building {name}")
        systems[name] = build_system(name, request, task)
    samples: dict[str, list[Sample]] = {name: [] for name in systems}
    steps = request.steps_per_round
    for turn in range(request.warmups + request.rounds):
        screen.note(f"round {turn + 1} of {request.warmups + request.rounds}")
        numbers = range(turn * steps, (turn + 1) * steps)
        for name in rotated(list(systems), turn):
            sample = _run_round(request, task, systems[name], numbers)
            if turn >= request.warmups:
                samples[name].append(sample)
    for system in systems.values():
        system.close()
    return build_result(request, samples, task_name=task.name)


def _run_round(request: TrainingRequest, task: Task, system: System, steps: range) -> Sample:
    """Do some steps; they begin at a barrier, and count until the slowest rank's end."""
    batches = [task.batch(step, dist.get_rank()) for step in steps]
    dist.barrier()
    sent, started = _link_bytes(request), time.perf_counter()
    loss = torch.zeros(())
    for batch in batches:
        loss = system.step(batch)
    seconds = torch.tensor((time.perf_counter() - started) / len(steps), dtype=torch.float64)
    # What the last step sent may still wait for the link.
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    sent_after = _link_bytes(request)
    through_link = None if sent is None or sent_after is None else (sent_after - sent) / len(steps)
    dist.all_reduce(loss)
    mean_loss = float(loss) / request.ranks
    return Sample(float(seconds), mean_loss, through_link, dict(system.figures))


def _train(request: TrainingRequest, task: Task, screen: Screen) -> dict[str, Any]:
    curves: dict[str, Curve] = {}
    for name in request.systems:
        system = build_system(name, request, task)
        curves[name] = train(request, task, name, system, screen)
        system.close()
    return build_quality(request, curves, task_name=task.name)


def _link_bytes(request: TrainingRequest) -> int | None:
    """Return what this host's link has sent; None where the ranks share a machine."""
    return None if request.mbit is None else int(_LINK_COUNTER.read_text())


if __name__ == "__main__":
    run_main(main)
