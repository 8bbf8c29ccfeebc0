# SPDX-License-Identifier: Apache-2.0
"""Loops without a model in ranks of different speeds that get SIGTERM; then engines that do.

Arguments: result folder, ``loops`` or ``engines`` and their cases, or ``asynchronous``.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import (
    build_gpt2,
    configuration,
    leave,
    sine_batches,
    start_stages,
    token_batches,
    weights_digest,
)
from torch import distributed

import wavemare
from wavemare.engine import Interruption
from wavemare.errors import ConfigError

STEPS, SIGNALLED_AT = 30, 10


class SlowStore(distributed.Store):
    """Lets the other ranks run on between what rank 0 reads and what it writes."""

    def __init__(self, store: distributed.Store, let_run: Callable[[], None]) -> None:
        super().__init__()
        self.store, self.let_run = store, let_run

    def add(self, key: str, amount: int) -> int:
        if key.endswith("stop_at"):
            self.let_run()
        return int(self.store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))


def open_store(name: str) -> Any:
    """Return a store of all ranks."""
    return distributed.FileStore(str(Path(sys.argv[1], name)), distributed.get_world_size())


def interruption_of(name: str, lead: int, let_run: Callable[[], None]) -> Interruption:
    """Return one with a store that lets the others run on before rank 0 writes."""
    store = open_store(name)
    slow = SlowStore(store, let_run) if distributed.get_rank() == 0 else store
    return Interruption(lead=lead, store=slow)


class Loop:
    """Steps that no rank finishes before rank 0 has begun the one ``lead`` steps before."""

    def __init__(self, name: str, lead: int) -> None:
        self.lead, self.rank = lead, distributed.get_rank()
        self.store = open_store(f"{name} steps")
        self.seconds = [0.01, 0.0, 0.002, 0.015][self.rank]
        self.furthest = 0
        self.store.set(str(self.rank), "0")

    def step(self, step: int) -> None:
        time.sleep(random.uniform(0, 2 * self.seconds))
        self.store.set(str(self.rank), str(step))
        while self.rank and self.begun(0) < step - self.lead:
            time.sleep(0.001)
        self.furthest = max(self.furthest, step - self.begun(0))

    def begun(self, rank: int) -> int:
        return int(self.store.get(str(rank)))

    def let_run(self) -> None:
        """Wait until all others wait for this rank's next step."""
        while min(map(self.begun, (1, 2, 3))) <= self.begun(0) + self.lead:
            time.sleep(0.001)


def loop(name: str, signalled: set[int], *, lead: int = 0, told: int | None = None) -> dict:
    """Run one loop on all ranks, and return how it ended on this one."""
    steps, rank = Loop(name, lead), distributed.get_rank()
    result: dict[str, Any] = {"stopped": None, "error": None}
    distributed.barrier()
    with interruption_of(name, lead if told is None else told, steps.let_run) as interruption:
        for step in range(1, STEPS + 1):
            steps.step(step)
            # Each rank at a step of its own, and once more.
            if rank in signalled and step - SIGNALLED_AT in (rank, rank + 2):
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                if interruption.stops_after(step):
                    result["stopped"] = step
                    os.kill(os.getpid(), signal.SIGTERM)  # as schedulers repeat it
                    break
            except ConfigError as error:
                result["error"] = error.key
                break
    result["furthest"] = steps.furthest
    distributed.barrier()
    return result


EVERY = {0, 1, 2, 3}
LOOPS: dict[str, Any] = {
    "rank 0": {"signalled": {0}},
    "rank 2": {"signalled": {2}},
    "all": {"signalled": EVERY},
    "none": {"signalled": set()},
    "ahead, rank 0": {"signalled": {0}, "lead": 3},
    "ahead, rank 1": {"signalled": {1}, "lead": 3},
    "ahead, all": {"signalled": EVERY, "lead": 3},
    "lead too small": {"signalled": {0}, "lead": 4, "told": 0},
}


def build(case: str) -> tuple[Any, Any]:
    pipeline, rank = case == "pipeline", distributed.get_rank()
    section = {"pipeline": {"stages": 2, "inputs": ["input_ids"]}} if pipeline else {}
    config = configuration(1 if pipeline else int(case), wavemare=section)
    engine, *_ = wavemare.initialize(model=build_gpt2(), config=config)
    torch.manual_seed(1000 + rank)
    data = token_batches(0 if pipeline else rank)
    return engine, ({"input_ids": batch, "labels": batch} for batch in data)


def train(case: str, folder: Path) -> dict:
    """Train some steps, and again with a stop and a resumption in between."""
    steps, losses, parted = 9, [], []
    engine, batches = build(case)
    for _ in range(steps):
        losses.append(engine.train_batch(batches).item())
    whole = weights_digest(engine)

    engine, batches = build(case)
    stopped = None
    with Interruption() as interruption:
        for step in range(1, steps + 1):
            if step == 3 and distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            parted.append(engine.train_batch(batches).item())
            if interruption.stops_after(step):
                stopped = step
                engine.save_checkpoint(str(folder))
                break
    engine, _ = build(case)
    engine.load_checkpoint(str(folder))
    begun = engine.global_steps
    parted += [engine.train_batch(batches).item() for _ in range(begun, steps)]
    return {
        "stopped": stopped,
        "begun": begun,
        "losses": [losses, parted],
        "weights": [whole, weights_digest(engine)],
    }


def build_asynchronous(micro_batches: int) -> Any:
    torch.manual_seed(7)
    stages = distributed.get_world_size()
    layers = [torch.nn.Linear(16, 16) for _ in range(2 * stages)]
    section = {"schedule": "pipemare"}
    return start_stages(layers, stages=stages, micro_batches=micro_batches, section=section)


def asynchronous(signalled: int, micro_batches: int) -> dict:
    """Stop and resume an asynchronous pipeline, and train one that drains where it stopped."""
    rank, steps = distributed.get_rank(), 40
    lead = (distributed.get_world_size() - 1) // micro_batches
    folder, name, ahead = Path(sys.argv[1]) / str(signalled), f"begun {signalled}", 0
    engine, batches, losses = build_asynchronous(micro_batches), sine_batches(16), []
    begun = open_store(f"{name} steps")
    with interruption_of(name, lead, lambda: time.sleep(0.2)) as interruption:
        for step in range(1, steps + 1):
            if rank == 0:
                begun.set("step", str(step))
            if step == 10 and rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(float(engine.train_batch(batches)))
            ahead = max(ahead, step - int(begun.get("step")))
            if interruption.stops_after(step):
                break
    engine.save_checkpoint(str(folder))
    stopped = engine.global_steps
    engine = build_asynchronous(micro_batches)
    engine.load_checkpoint(str(folder))
    batches = islice(sine_batches(16), stopped * micro_batches, None)
    losses += [float(engine.train_batch(batches)) for _ in range(stopped, steps)]

    whole, batches, expected = build_asynchronous(micro_batches), sine_batches(16), []
    for step in range(steps):
        if step == stopped:
            whole.drain()
        expected.append(float(whole.train_batch(batches)))
    return {
        "stopped": stopped,
        "ahead": ahead,
        "losses": [expected, losses],
        "weights": [weights_digest(whole), weights_digest(engine)],
    }


def main(mode: str, *cases: str) -> dict:
    if mode == "loops":
        return {name: loop(name, **LOOPS[name]) for name in cases}
    if mode == "engines":
        return {case: train(case, Path(sys.argv[1]) / case) for case in cases}
    return {"1": asynchronous(0, 1), "2": asynchronous(3, 2)}


if __name__ == "__main__":
    wavemare.init_distributed()
    leave(main(*sys.argv[2:]))
