# SPDX-License-Identifier: Apache-2.0
"""Two ranks, of which one sleeps twice as long for each sample: measured and trained."""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from common import leave

import wavemare
from wavemare.parallel.balance import balance_replicas

MICRO, WIDTH, ROUNDS = 12, 8, 5
FAST_S = 0.02
"""Seconds of a sample on the fast device; steps take much longer than what is around them."""


class Sleep(torch.autograd.Function):
    """Takes its time: a third forward, two thirds backward."""

    @staticmethod
    def forward(context, tensor, seconds):
        context.seconds = seconds
        time.sleep(seconds / 3)
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds * 2 / 3)
        return gradient, None


class Paced(torch.nn.Module):
    """A layer on a device that takes a fixed time for a sample."""

    def __init__(self, sample_s):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, 1)
        self.sample_s = sample_s

    def forward(self, x):
        output = Sleep.apply(self.layer(x), len(x) * self.sample_s)
        return SimpleNamespace(loss=output.square().mean())


def main():
    wavemare.init_distributed()
    pace = FAST_S * (1 + dist.get_rank())
    batch = {
        "train_batch_size": 2 * MICRO,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 1,
    }
    plan = balance_replicas(Paced(pace), samples, batch)
    shares = {"equal": [MICRO, MICRO], "planned": list(plan.shares)}
    engines = {name: build(pace, share) for name, share in shares.items()}
    times: dict[str, list[float]] = {"equal": [], "planned": []}
    losses: dict[str, list[float]] = {"equal": [], "planned": []}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            seconds, loss = step(engine, shares[name])
            times[name].append(seconds)
            losses[name].append(loss)
    leave(
        {
            "shares": plan.shares,
            "predicted": plan.predicted.step_s,
            "seconds": {name: min(found) for name, found in times.items()},
            "losses": losses,
        }
    )


def build(pace, shares):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "wavemare": {"balance": {"shares": list(shares)}},
    }
    return wavemare.initialize(model=Paced(pace), config=config)[0]


def step(engine, shares):
    """Train on this rank's part of the same samples; return the slowest rank's seconds."""
    before, own = sum(shares[: engine.data_rank]), shares[engine.data_rank]
    batch = samples(2 * MICRO)["x"][before : before + own]
    dist.barrier()
    started = time.perf_counter()
    loss = engine.train_batch(iter([{"x": batch}]))
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds), float(loss)


def samples(count):
    return {"x": torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))}


main()
