# SPDX-License-Identifier: Apache-2.0
"""A replica of ``benchmarks elastic``: it sleeps, steps, and writes down when.

Arguments: the folder of the run, the request as JSON, the system. Each step appends a line
``[optimizer step, Unix time, replicas of the last exchange, exchanges missed since, process]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import wavemare
from benchmarks.local_steps.elastic_request import ElasticRequest
from wavemare.failure import run_main

_RATE = 1e-3


class _Sleeping(torch.nn.Module):
    """A layer whose computation is a pause."""

    def __init__(self, request: ElasticRequest) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.pause_s = request.step_ms / 1000
        self.weight = torch.nn.Parameter(torch.randn(request.weights))

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        """Return a loss of a few weights, (): the others have no gradient, and still travel."""
        time.sleep(self.pause_s)
        return (self.weight[:256] * number).square().mean()


def _numbers() -> Iterator[torch.Tensor]:
    while True:
        yield torch.ones(1)


def main() -> None:
    """Train until the last step."""
    folder, request = Path(sys.argv[1]), ElasticRequest.model_validate_json(sys.argv[2])
    name = sys.argv[3]
    local = {"mode": "diloco", "every": request.every}
    local |= (
        {"elastic": {"replicas": request.replicas}}
        if name.startswith("elastic")
        else {"replica": "rank"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": _RATE, "torch_adam": True}},
        "steps_per_print": None,
        "wavemare": {"local_steps": local},
    }
    torch.set_num_threads(1)
    engine = wavemare.initialize(model=_Sleeping(request), config=config)[0]
    saves = name.startswith("restarts")
    if saves and (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
    last = request.steps if name.endswith("-killed") else request.calm_steps
    data, present = _numbers(), 0.0
    with open(folder / f"{engine.data_rank}.jsonl", "a", buffering=1) as file:
        while engine.global_steps < last:
            engine.train_batch(data)
            metrics = engine.step_metrics()
            present = metrics.get("replicas", present)
            missed = metrics.get("missed_exchanges", 0)
            row = [engine.global_steps, time.time(), present, missed, os.getpid()]
            file.write(f"{json.dumps(row)}\n")
            if saves and engine.global_steps % request.every == 0:
                engine.save_checkpoint(str(folder))
        engine.synchronize()
    engine.destroy()


if __name__ == "__main__":
    run_main(main)
