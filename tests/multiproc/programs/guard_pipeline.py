# SPDX-License-Identifier: Apache-2.0
"""Wrong numbers in pipelines: one module of one stage spoils one micro-batch.

Arguments: folder, and a JSON object of [property, settings] by name.
"""

import itertools
import json
import math
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from common import (
    InfiniteGradient,
    furthest,
    leave,
    refusal,
    sine_batches,
    split_stages,
    start_stages,
    warnings_told,
    weights_digest,
)

from wavemare.engine import init_distributed
from wavemare.engine.pipe.chunks import ChunkedPipelineModule
from wavemare.errors import WavemareError
from wavemare.pipeline.staleness.replay import Replay

WIDTH, SIZE = 16, 2


class Spoil(torch.nn.Module):
    """The identity, but for one micro-batch, known again by its contents in a second pass.

    Args:
        what: activation or gradient; None never spoils.
        call: Which forward pass, counted from 0.
    """

    def __init__(self, what, call):
        super().__init__()
        self.what, self.call, self.seen, self.key = what, call, 0, None

    def forward(self, x):
        key = float(x.detach().sum())
        if self.what and self.seen == self.call:
            self.key = key
        self.seen += 1
        if key != self.key:
            return x
        return x * float("nan") if self.what == "activation" else InfiniteGradient.apply(x)


def spoil_weight(weight, call):
    """Make a weight's own gradient infinite in one backward pass, and nothing else."""
    calls = itertools.count()
    weight.register_hook(lambda gradient: gradient * math.inf if next(calls) == call else None)


def build_layers(num_stages, stage, what, call):
    torch.manual_seed(7)
    layers = []
    for index in range(num_stages):
        bad = what if index == stage else None
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
        layers.append(Spoil(bad if bad != "weight" else None, call))
        if bad == "weight":
            spoil_weight(layers[-3].weight, call)
        layers.append(torch.nn.LayerNorm(WIDTH))
    return layers


def build(trouble, micro_batches, guard, section=None, schedule=None, homes=None, **config):
    stages = torch.distributed.get_world_size()
    pipeline = {} if section is None else {"schedule": "pipemare", "pipemare": section}
    if schedule:
        pipeline = {"schedule": schedule}
    layers = stages if homes is None else len(homes)
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    return start_stages(
        build_layers(layers, *trouble),
        stages=stages,
        kind=partial(ChunkedPipelineModule, homes=homes),
        micro_batches=micro_batches,
        section=pipeline,
        sections={"guard": guard},
        **{"optimizer": adam, **config},
    )


def batches(steps, micro_batches, left_out=-1, dtype=torch.float32):
    data = islice(sine_batches(WIDTH, dtype=dtype), steps * micro_batches)
    for number, batch in enumerate(data):
        if number // micro_batches != left_out:
            yield batch


def train(engine, steps, micro_batches, left_out=-1):
    data, applied = batches(steps + 2, micro_batches, left_out), []
    for _ in range(steps - (left_out >= 0)):
        engine.train_batch(data)
        applied.append(bool(engine.was_step_applied()))
    return applied


def skip(trouble, micro_batches, **settings):
    """A synchronous pipeline leaves a step out on all stages."""
    bad = trouble[2] // micro_batches
    engine = build(trouble, micro_batches, {"nonfinite": "skip"}, **settings)
    with warnings_told("guard") as said:
        applied = train(engine, 6, micro_batches)
    found = {"applied": applied, "said": said, "steps": engine.global_steps}
    twin = build([0, None, 0], micro_batches, {"nonfinite": "off"}, **settings)
    train(twin, 6, micro_batches, bad)
    found["same"] = weights_digest(engine) == weights_digest(twin)
    return found


class CarefulAdamW(torch.optim.AdamW):
    """Makes no step with gradients that are not finite."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        if all(bool(p.grad.isfinite().all()) for p in parameters):
            super().step()


def replay(trouble, micro_batches, mode):
    """An asynchronous pipeline that skips against its replay in one process, version by version."""
    section = {"discrepancy_correction": {"mode": mode}}
    engine = build(trouble, micro_batches, {"nonfinite": "skip"}, section)
    steps = 14
    data, losses, applied = batches(steps + 8, micro_batches), [], []
    with warnings_told("guard") as said:
        for _ in range(steps):
            losses.append(float(engine.train_batch(data)))
            applied.append(bool(engine.was_step_applied()))
        engine.drain()
    count = torch.distributed.get_world_size()
    stages = split_stages(build_layers(count, *trouble), count)
    twin = Replay(
        stages,
        torch.nn.functional.mse_loss,
        lambda parameters: CarefulAdamW(parameters, lr=0.01, weight_decay=0.0),
        micro_batches,
        correction=mode,
    )
    data = batches(steps, micro_batches)
    expected = [twin.step([next(data) for _ in range(micro_batches)]) for _ in range(steps)]
    parameters = list(engine.module.parameters())
    return {
        "losses": [losses, expected],
        "applied": applied,
        "distance": furthest(parameters, stages[engine.stage_id].parameters()),
        "finite": all(bool(p.isfinite().all()) for p in parameters),
        "said": said,
    }


def stop(trouble, micro_batches, uncaught=False, **settings):
    """What each rank says when the run stops, and whether its weights are sound."""
    engine = build(trouble, micro_batches, {"nonfinite": "stop"}, **settings)
    dtype = next(engine.module.parameters()).dtype
    data, done, lead = batches(16, micro_batches, dtype=dtype), 0, engine.step_lead
    try:
        for _ in range(10):
            engine.train_batch(data)
            done += 1
    except WavemareError as error:
        if uncaught:
            raise
        finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
        told = {"error": str(error), "type": type(error).__name__, "at": done, "finite": finite}
        return {**told, "lead": lead}
    return {"error": None, "at": done}


def last(trouble, micro_batches, folder, **settings):
    """A bad step is the run's last: what comes after it, and a return to the step before."""
    bad, folder = trouble[2] // micro_batches, Path(sys.argv[1], folder)
    engine = build(trouble, micro_batches, {"nonfinite": "stop"}, **settings)
    data = batches(bad + 1, micro_batches)
    for step in range(bad + 1):
        if step == bad:
            engine.save_checkpoint(folder, "sound")
            before = weights_digest(engine)
        engine.train_batch(data)
    found = {
        "saved": refusal(partial(engine.save_checkpoint, folder, "bad")),
        "evaluated": refusal(partial(engine.eval_batch, batches(1, micro_batches))),
        "there": sorted(each.name for each in folder.iterdir() if each.is_dir()),
        "latest": (folder / "latest").read_text(),
    }
    engine.load_checkpoint(folder)
    found["same"] = weights_digest(engine) == before
    losses = [float(engine.train_batch(batches(1, micro_batches))) for _ in range(4)]
    engine.save_checkpoint(folder, "after")
    return found | {"finite": all(map(math.isfinite, losses))}


if __name__ == "__main__":
    init_distributed()
    cases = json.loads(sys.argv[2])
    found = {key: globals()[name](**settings) for key, (name, settings) in cases.items()}
    leave(found)
