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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import wavemare
from benchmarks.local_steps.elastic_request import ElasticRequest
from wavemare.engine.config.sections import ElasticConfig, OuterConfig
from wavemare.engine.launch.environment import REPLICA
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


class _Log:
    """The lines of this replica; see the module."""

    def __init__(self, folder: Path, replica: int) -> None:
        self._file = open(folder / f"{replica}.jsonl", "a", buffering=1)

    def add(self, step: int, replicas: float, missed: float) -> None:
        """Write the line of a step."""
        self._file.write(f"{json.dumps([step, time.time(), replicas, missed, os.getpid()])}\n")


def _train(request: ElasticRequest, name: str, folder: Path, last: int) -> None:
    """Train with local steps: replicas that come and go, or ranks of one job."""
    elastic = name.startswith("elastic")
    kind = {"elastic": {"replicas": request.replicas}} if elastic else {"replica": "rank"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": _RATE, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "wavemare": {"local_steps": {"mode": "diloco", "every": request.every, **kind}},
    }
    engine = wavemare.initialize(model=_Sleeping(request), config=config)[0]
    saves = name.startswith("restarts")
    if saves and (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
    log, data, present = _Log(folder, engine.data_rank), _numbers(), 0.0
    engine.join_replicas()
    while engine.global_steps < last:
        engine.train_batch(data)
        metrics = engine.step_metrics()
        present = metrics.get("replicas", present)
        log.add(engine.global_steps, present, metrics.get("missed_exchanges", 0))
        if saves and engine.global_steps % request.every == 0:
            engine.save_checkpoint(str(folder))
    engine.synchronize()
    engine.destroy()


def _train_torchft(request: ElasticRequest, folder: Path, last: int) -> None:
    """Train with torchft's DiLoCo, of which all state is registered."""
    from torch._C._distributed_c10d import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    replica = int(os.environ[REPLICA])
    model, settings = _Sleeping(request), OuterConfig()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    outer = torch.optim.SGD(model.parameters(), settings.lr, settings.momentum, nesterov=True)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=ElasticConfig().timeout_s)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{replica}",
        hostname="localhost",
        init_sync=False,
    )
    log, data = _Log(folder, replica), _numbers()
    with DiLoCo(manager, [model], optimizer, [outer], request.every):
        while (begun := manager.current_step() * request.every) < last:
            for step in range(1, request.every + 1):
                optimizer.zero_grad()
                model(next(data)).backward()
                optimizer.step()  # with the exchange, after the last one of a period
                there = float(manager.num_participants())
                missed = step == request.every and manager.current_step() * request.every == begun
                log.add(begun + step, there, float(missed))
    manager.shutdown(wait=False)


def main() -> None:
    """Train until the last step."""
    folder, request = Path(sys.argv[1]), ElasticRequest.model_validate_json(sys.argv[2])
    name = sys.argv[3]
    last = request.steps if name.endswith("-killed") else request.calm_steps
    torch.set_num_threads(1)
    if name.startswith("torchft"):
        _train_torchft(request, folder, last)
    else:
        _train(request, name, folder, last)


if __name__ == "__main__":
    run_main(main)
