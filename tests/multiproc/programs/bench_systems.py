# SPDX-License-Identifier: Apache-2.0
"""Train the systems of the benchmarks for some steps; compare with one process that does all.

Each rank leaves, for each system and number of micro-batches, the largest difference of its weights
from those of plain training, and the actions that were noted.
"""

import sys
from collections import Counter
from unittest import mock

import torch
from common import leave

from benchmarks.pipeline import workloads
from benchmarks.pipeline.request import SYSTEMS, PipelineRequest
from benchmarks.pipeline.systems import BUILDERS, Place, build_optimizer
from benchmarks.pipeline.workloads import build_workload
from wavemare.engine import init_distributed

STEPS = 3


def plain_training(workload, parts, micro_batches, kind):
    model = torch.nn.Sequential(*workload.parts(parts))
    optimizer = build_optimizer(workload, kind, model)
    for step in range(STEPS):
        for number in range(micro_batches):
            index = (step * micro_batches + number) % len(workload.batches)
            inputs, labels = workload.batches[index]
            (workload.loss(model(inputs), labels) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model)


def weights_of(runner):
    if hasattr(runner, "engine"):
        return list(runner.engine.module.parameters())
    return list(runner.module.parameters())


def waits_of(name, workload):
    """Return how often a rank sleeps how long in a step, without sleeping."""
    runner = BUILDERS[name](workload, Place(rank, stages, 4))
    with mock.patch.object(workloads, "sleep", return_value=None) as sleep:
        for _ in range(2):  # torch's first step finds out the shapes
            sleep.reset_mock()
            runner.step()
            runner.drain()
    return Counter(round(1000 * call.args[0], 3) for call in sleep.call_args_list)


if __name__ == "__main__":
    init_distributed()
    rank, stages = torch.distributed.get_rank(), torch.distributed.get_world_size()
    request = PipelineRequest(
        stages=stages, layers=4, hidden=16, heads=2, vocabulary=13, sequence=8, batch=2
    )
    workload = build_workload(request)
    results = {}
    for name, system in SYSTEMS.items():
        for count in map(int, sys.argv[2:]):
            # The asynchronous system learns something else, and the bound nothing.
            if system.steady or request.obstacle(name, count) is not None:
                continue
            runner = BUILDERS[name](workload, Place(rank, stages, count))
            start = [weight.detach().clone() for weight in weights_of(runner)]
            for _ in range(STEPS):
                runner.step()
            runner.drain()
            parts = stages * system.parts_per_stage
            trained = plain_training(workload, parts, count, system.optimizer)
            second = rank + stages if "interleaved" in name else parts - 1 - rank
            held = [rank] if parts == stages else [rank, second]
            expected = [weight for index in held for weight in trained[index].parameters()]
            pairs = list(zip(weights_of(runner), expected, strict=True))
            events = runner.take() if runner.take is not None else []
            results[f"{name} {count}"] = {
                "difference": max(float((a - b).abs().max()) for a, b in pairs),
                "way": max(
                    float((a - b).abs().max())
                    for a, b in zip(weights_of(runner), start, strict=True)
                ),
                "actions": Counter(f"{e.action.stage}{e.action.kind.value}" for e in events),
                "ordered": all(e.start_s <= e.end_s for e in events),
                "guarded": getattr(getattr(runner, "engine", None), "guard", None) is not None,
            }
    synthetic = build_workload(PipelineRequest(stages=stages, synthetic=True, weight_ms=8.0))
    results["waits"] = {name: waits_of(name, synthetic) for name in SYSTEMS}
    bound = BUILDERS["no-communication-bound"](workload, Place(rank, stages, 5))
    bound.step()
    results["bound"] = [str(event.action) for event in bound.take()]
    leave(results)
