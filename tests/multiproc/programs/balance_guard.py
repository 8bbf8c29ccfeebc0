# SPDX-License-Identifier: Apache-2.0
"""Two ranks, of which one sleeps twice as long for each sample: planned, trained and watched."""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from common import leave

import wavemare
from wavemare.errors import ConfigError
from wavemare.parallel.balance import balance_replicas
from wavemare.parallel.guard import STEPS, Guard
from wavemare.parallel.speed import Line, Speed

MICRO, WIDTH, ROUNDS = 12, 8, 5
FAST_S = 0.02
SHORT_S = 0.003
"""Of a sample on the fast device: so that steps take much longer than what is around them; and
where many are taken."""


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
    plan, speeds = balance_replicas(Paced(pace), samples, batch)
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
            "sample_s": [speed.whole.sample_s for speed in speeds],
            "seconds": {name: min(found) for name, found in times.items()},
            "losses": losses,
            "guard": guarded(),
        }
    )


def guarded():
    """A plan that was made of wrong speeds is mended; then the fast device becomes slow."""
    pace = SHORT_S * (1 + dist.get_rank())
    line = Line(0.0, SHORT_S)
    wrong = [Speed(Line(0.0, line.sample_s / 3), line)] * 2
    engine = build(pace, [MICRO, MICRO])
    applied = [[MICRO, MICRO]]
    guard = Guard(engine, wrong, applied[0], lambda shares: applied.append(list(shares)))
    verdicts = []
    for _ in range(STEPS):
        step(engine, applied[-1])
        verdicts.append(guard.after_step())
    early = [verdict for verdict in verdicts[:-1] if verdict is not None]
    quiet = guard.at_checkpoint()
    engine.module.sample_s = SHORT_S * (2 - dist.get_rank())
    for _ in range(5 * STEPS):
        step(engine, applied[-1])
        assert guard.after_step() is None
    drifted = guard.at_checkpoint()
    guard.close()
    try:
        build(pace, None).share_out([MICRO, MICRO])
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return {
        "early": len(early),
        "error": verdicts[-1].error,
        "text": str(verdicts[-1]),
        "quiet": quiet is None,
        "drifted": None if drifted is None else drifted.imbalance,
        "applied": applied[1:],
        "refused": refused,
    }


def build(pace, shares):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "wavemare": {"balance": {"shares": list(shares)}} if shares else {},
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
