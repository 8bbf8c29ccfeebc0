# SPDX-License-Identifier: Apache-2.0
"""Part ``schedules``: pipelines of two ranks, their losses, and what they cost the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.request import SCHEDULES
from benchmarks.gpu.run import skip
from benchmarks.gpu.timing import Scene
from benchmarks.pipeline.request import PipelineRequest
from benchmarks.pipeline.systems import (
    BUILDERS,
    Place,
    Runner,
    build_optimizer,
    build_wavemare,
)
from benchmarks.pipeline.workloads import Workload, build_workload
from benchmarks.ranks import interleaved
from wavemare.engine.launch.group import gather

_RANKS, _MICRO_BATCHES = 2, 8
_STEPS = 2
"""In which losses are compared, and of a round."""
_TOLERANCE = 1e-4
_PIPEMARE = "wavemare-pipemare"
_DRAINED = "wavemare-pipemare-drained"
_BUILDERS: Mapping[str, Callable[[Workload, Place], Runner]] = {
    **BUILDERS,
    # It ends each step with all micro-batches, and so learns what one process does.
    _DRAINED: partial(build_wavemare, schedule="pipemare", pipemare={"drain_interval": 1}),
}


class _Sample(NamedTuple):
    """Of a micro-batch, in one round.

    Args:
        device_s: Until the device has done the steps.
        host_s: Until the calls returned; they wait for the messages that they need.
        cpu_s: Processor time of all threads.
    """

    device_s: float
    host_s: float
    cpu_s: float


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows, of a micro-batch; a system with wrong losses is left out.

    ``loss`` is that of the last compared step, ``loss_gap`` the largest difference to one process
    in any of them, relative to it. PipeMare's are None: it learns something else, unless drained.
    """
    size = {"layers": 4, "hidden": 16, "heads": 2, "vocabulary": 13, "sequence": 8}
    request = PipelineRequest.of(stages=_RANKS, **(size if scene.job.tiny else {}))
    workload = build_workload(request)
    expected = _plain_losses(workload, scene.device)
    place = Place(dist.get_rank(), _RANKS, _MICRO_BATCHES)
    case = f"M={_MICRO_BATCHES}"
    runners: dict[str, Runner] = {}
    found: dict[str, tuple[float | None, float | None]] = {}
    for name in (name for name in SCHEDULES if name in scene.job.systems):
        scene.note(f"building {name}")
        runner = _BUILDERS[name](workload, place)
        losses = _losses(runner)
        gap = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        if name == _PIPEMARE:
            found[name] = None, None
        elif gap > _TOLERANCE:
            reason = f"its losses differ from those of one process by {gap:g}"
            yield skip("schedules", reason, case=case, system=name)
            continue
        else:
            found[name] = losses[-1], gap
        runners[name] = runner
    samples: dict[str, list[Sequence[_Sample]]] = {name: [] for name in runners}
    for timed, name in interleaved(scene.job, list(runners), scene.note):
        sample = gather(_round(scene, runners[name]))
        if timed:
            samples[name].append(sample)
    for name, rounds in samples.items():
        yield {
            "part": "schedules",
            "case": case,
            "system": name,
            "median_s": median(max(sample.device_s for sample in ranks) for ranks in rounds),
            "host_s": median(max(sample.host_s for sample in ranks) for ranks in rounds),
            "cpu_s": median(mean(sample.cpu_s for sample in ranks) for ranks in rounds),
            "rounds_s": [max(sample.host_s for sample in ranks) for ranks in rounds],
            "loss": found[name][0],
            "loss_gap": found[name][1],
        }


def _losses(runner: Runner) -> list[float]:
    """Return the losses of the first steps, of the rank that knows them."""
    own = []
    for _ in range(_STEPS):
        loss = runner.step()
        own.append(None if loss is None else float(loss))
    runner.drain()
    return next(losses for losses in gather(own) if None not in losses)


def _plain_losses(workload: Workload, device: torch.device) -> list[float]:
    """Return the losses of the same steps in one process."""
    model = nn.Sequential(*workload.parts(1)).to(device)
    optimizer = build_optimizer(workload, "AdamW", model)
    losses = []
    for step in range(_STEPS):
        total = torch.zeros((), device=device)
        for number in range(_MICRO_BATCHES):
            index = (step * _MICRO_BATCHES + number) % len(workload.batches)
            inputs, labels = (tensor.to(device) for tensor in workload.batches[index])
            loss: Tensor = workload.loss(model(inputs), labels) / _MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def _round(scene: Scene, runner: Runner) -> _Sample:
    """Run some steps behind an untimed one; all ranks call together."""
    dist.barrier()
    runner.step()
    scene.synchronize()
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(_STEPS):
        runner.step()
    host_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    scene.synchronize()
    device_s = time.perf_counter() - started
    runner.step()  # no rank computes beside an idle one
    runner.drain()
    count = _STEPS * _MICRO_BATCHES
    return _Sample(device_s / count, host_s / count, cpu_s / count)
