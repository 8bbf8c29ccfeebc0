# SPDX-License-Identifier: Apache-2.0
"""An error on one rank within a step, which a script catches: what all ranks hear, and then do.

Usage: left_steps.py FOLDER CASE...; a case is WHERE/SCHEDULE.
"""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from common import leave, refusal, sine_batches, start_stages, weights_digest
from deepspeed.utils import groups

import wavemare
from wavemare.engine.pipe.chunks import ChunkedPipelineModule
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.run_plan import homes_of

WIDTH, STAGES, MICRO = 8, 2, 2
BAD_CALL = 2 * MICRO + 2  # of the third step, also where the first stage is one ahead


class Failing(torch.nn.Module):
    """The identity, which fails in one pass of training or evaluation on one rank."""

    def __init__(self, rank, *, trains=True):
        super().__init__()
        self.fails, self.calls = torch.distributed.get_rank() == rank, 0
        self.trains = trains

    def forward(self, x):
        if self.fails and not (self.trains or self.training):
            raise torch.OutOfMemoryError("no memory for this pass")
        self.calls += self.training
        if self.trains and self.fails and self.calls == BAD_CALL:
            self.calls += 1
            raise torch.OutOfMemoryError("no memory for this pass")
        return x


class FailingOptimizer(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == 0:
            raise torch.OutOfMemoryError("no memory for this step")
        return super().step(closure)


def start(where, schedule):
    groups.mpu = None
    torch.manual_seed(5)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    homes = homes_of(PipelineConfig(schedule=schedule), STAGES)
    if where in ("first", "last", "evaluation"):
        # Of the last replica; ranks of one stage follow each other.
        replicas = torch.distributed.get_world_size() // STAGES
        stage = 0 if where == "first" else len(homes) - 1
        rank = (homes[stage] + 1) * replicas - 1
        place, failing = -(where != "first"), Failing(rank, trains=where != "evaluation")
        layers[place] = torch.nn.Sequential(layers[place], failing)
    chunked = len(homes) > STAGES
    kind = {"kind": partial(ChunkedPipelineModule, homes=homes)} if chunked else {}
    optimizer = partial(FailingOptimizer, lr=0.1) if where == "optimizer" else None
    return start_stages(
        layers,
        stages=STAGES,
        micro_batches=MICRO,
        section={"schedule": schedule},
        client_optimizer=optimizer,
        **kind,
    )


def failing_loader():
    yield from islice(sine_batches(WIDTH), BAD_CALL - 1)
    raise OSError("the disk has gone")


def run(where, schedule, folder):
    engine, data = start(where, schedule), sine_batches(WIDTH)
    if where == "loader" and torch.distributed.get_rank() == 0:
        data = failing_loader()
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    saves = torch.distributed.get_world_size() == STAGES
    if saves:
        engine.save_checkpoint(folder)
    found = {"losses": losses, "heard": [], "weights": weights_digest(engine)}
    calls = [partial(engine.train_batch, data)] * 2
    if where == "evaluation":
        calls[0] = partial(engine.eval_batch, sine_batches(WIDTH, seed=3))
    for call in calls:
        try:
            call()
        except Exception as error:
            found["heard"].append(f"{type(error).__name__}: {error}")
    found["saved"] = refusal(lambda: engine.save_checkpoint(f"{folder}-later"))
    if saves:
        assert engine.load_checkpoint(folder)[0]
        found["again"] = float(engine.train_batch(sine_batches(WIDTH, seed=9)))
        found["loaded"] = True
    engine.destroy()
    return found


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1], "saved", name.replace("/", "-"))
        results[name] = run(*name.split("/"), str(folder))
    leave(results)
