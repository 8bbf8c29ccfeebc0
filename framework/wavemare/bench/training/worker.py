"""One rank of ``wavemare bench training``: started by ``mpirun``, asked by a file."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from wavemare.bench.machine import describe_machine
from wavemare.bench.rounds import rotated
from wavemare.bench.training.quality import Curve, train
from wavemare.bench.training.report import Sample, build_quality, build_result
from wavemare.bench.training.request import TrainingRequest
from wavemare.bench.training.systems import System, build_system
from wavemare.bench.training.task import Task, make_task
from wavemare.engine.launch import environment_rank, init_distributed
from wavemare.failure import run_main
from wavemare.files import atomic_write_text
from wavemare.observe import Screen, quiet_libraries

__all__ = ["main"]

_LINK_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


class _Options(NamedTuple):
    request: TrainingRequest
    result: Path


def main() -> None:
    """Measure what the request asks for; rank 0 writes the result."""
    options = _parse()
    request = options.request
    quiet_libraries()
    torch.set_num_threads(1)
    # MPICH and Open MPI have variables of their own.
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(environment_rank())
    init_distributed()
    quiet_libraries()
    screen = Screen(rank=dist.get_rank())
    task = make_task(request)
    if request.quality_steps is None:
        result = _time(request, task, screen)
    else:
        result = _train(request, task, screen)
    if dist.get_rank() == 0:
        atomic_write_text(options.result, json.dumps({"machine": describe_machine(), **result}))
    dist.barrier()
    dist.destroy_process_group()


def _parse() -> _Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", type=Path, required=True, help="file of the request")
    parser.add_argument("--result", type=Path, required=True, help="file for the result")
    parsed = parser.parse_args()
    text = parsed.request.read_text(encoding="utf-8")
    return _Options(TrainingRequest.from_json(text), parsed.result)


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
