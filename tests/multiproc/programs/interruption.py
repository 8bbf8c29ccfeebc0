# SPDX-License-Identifier: Apache-2.0
"""Loops without a model in ranks of different speeds that get SIGTERM; then engines that do.

Arguments: result folder, ``loops``, ``engines`` or ``asynchronous``.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
from common import build_gpt2, configuration, leave, token_batches, weights_digest
from torch import distributed

import wavemare
from wavemare.engine import Interruption
from wavemare.errors import ConfigError

STEPS = 60


def in_the_middle(seconds: float) -> None:
    """Send this process SIGTERM after some seconds, wherever it is then, and once more."""

    def send() -> None:
        for _ in range(2):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()


class SlowStore:
    """Gives the other ranks time to run on between what rank 0 reads and what it writes."""

    def __init__(self, store: distributed.Store) -> None:
        self.store, self.check = store, store.check

    def add(self, key: str, amount: int) -> int:
        time.sleep(0.2)
        return int(self.store.add(key, amount))


class Loop:
    """Steps that no rank finishes before rank 0 has begun the one ``lead`` steps before."""

    def __init__(self, name: str, lead: int) -> None:
        self.name, self.lead, self.rank = name, lead, distributed.get_rank()
        self.store = distributed.distributed_c10d._get_default_store()
        self.seconds = [0.01, 0.0, 0.002, 0.015][self.rank]
        self.furthest = 0

    def step(self, step: int) -> None:
        time.sleep(random.uniform(0, 2 * self.seconds))
        if self.rank == 0:
            self.store.add(self.name, 1)
            return
        while (begun := self.store.add(self.name, 0)) < step - self.lead:
            time.sleep(0.001)
        self.furthest = max(self.furthest, step - begun)


def loop(name: str, signalled: set[int], *, lead: int = 0, told: int | None = None) -> dict:
    """Run one loop on all ranks, and return how it ended on this one."""
    steps, rank = Loop(name, lead), distributed.get_rank()
    result: dict[str, Any] = {"stopped": None, "error": None}
    distributed.barrier()
    with Interruption(lead=lead if told is None else told) as interruption:
        if rank == 0:
            interruption._store = SlowStore(interruption._store)
        if rank in signalled:
            in_the_middle(0.1 + 0.03 * rank)
        for step in range(1, STEPS + 1):
            steps.step(step)
            try:
                if interruption.stops_after(step):
                    result["stopped"] = step
                    break
            except ConfigError as error:
                result["error"] = error.key
                break
        time.sleep(0.2)  # the second signal arrives
    result["furthest"] = steps.furthest
    distributed.barrier()
    return result


def cost() -> float:
    """Return the seconds that a step takes longer for being asked about."""
    with Interruption() as interruption:
        started = time.perf_counter()
        for step in range(2000):
            interruption.stops_after(step)
        seconds = (time.perf_counter() - started) / 2000
    distributed.barrier()
    return seconds


def loops() -> dict:
    every = set(range(distributed.get_world_size()))
    return {
        "rank 0": loop("rank 0", {0}),
        "rank 2": loop("rank 2", {2}),
        "all": loop("all", every),
        "none": loop("none", set()),
        "ahead, rank 0": loop("ahead, rank 0", {0}, lead=3),
        "ahead, rank 1": loop("ahead, rank 1", {1}, lead=3),
        "ahead, all": loop("ahead, all", every, lead=3),
        "lead too small": loop("lead too small", {0}, lead=4, told=0),
        "cost": cost(),
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
    """Train 20 steps, and again with a stop and a resumption in between."""
    steps, losses, parted = 20, [], []
    engine, batches = build(case)
    for _ in range(steps):
        losses.append(engine.train_batch(batches).item())
    whole = weights_digest(engine)

    engine, batches = build(case)
    stopped = None
    with Interruption() as interruption:
        for step in range(1, steps + 1):
            if step == 5 and distributed.get_rank() == 1:
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


def engines() -> dict:
    return {case: train(case, Path(sys.argv[1]) / case) for case in ("1", "3", "pipeline")}


def build_asynchronous(micro_batches: int) -> Any:
    torch.manual_seed(7)
    stages = distributed.get_world_size()
    layers = [torch.nn.Linear(16, 16) for _ in range(2 * stages)]
    module = deepspeed.PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "steps_per_print": None,
        "wavemare": {"pipeline": {"schedule": "pipemare", "stages": stages}},
    }
    return wavemare.initialize(model=module, config=config)[0]


def regression(begun: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = (torch.randn(2, 16, generator=generator) for _ in count())
    return ((x, torch.sin(x)) for x in islice(inputs, begun, None))


def asynchronous(signalled: int, micro_batches: int) -> dict:
    """Stop and resume an asynchronous pipeline, and train one that drains where it stopped."""
    rank, steps = distributed.get_rank(), 40
    lead = (distributed.get_world_size() - 1) // micro_batches
    store = distributed.distributed_c10d._get_default_store()
    folder, name, ahead = Path(sys.argv[1]) / str(signalled), f"begun {signalled}", 0
    engine, batches, losses = build_asynchronous(micro_batches), regression(), []
    with Interruption(lead=lead) as interruption:
        if rank == 0:
            interruption._store = SlowStore(interruption._store)
        for step in range(1, steps + 1):
            store.add(name, int(rank == 0))
            if rank == 0 and step < 20:
                time.sleep(0.02)
            if step == 10 and rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(float(engine.train_batch(batches)))
            ahead = max(ahead, step - store.add(name, 0))
            if interruption.stops_after(step):
                break
    engine.save_checkpoint(str(folder))
    stopped = engine.global_steps
    engine = build_asynchronous(micro_batches)
    engine.load_checkpoint(str(folder))
    batches = regression(stopped * micro_batches)
    losses += [float(engine.train_batch(batches)) for _ in range(stopped, steps)]

    whole, batches, expected = build_asynchronous(micro_batches), regression(), []
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


MODES: dict[str, Callable[[], dict]] = {
    "loops": loops,
    "engines": engines,
    "asynchronous": lambda: {"1": asynchronous(0, 1), "2": asynchronous(3, 2)},
}

if __name__ == "__main__":
    wavemare.init_distributed()
    leave(MODES[sys.argv[2]]())
