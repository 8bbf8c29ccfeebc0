# SPDX-License-Identifier: Apache-2.0
"""Trainings that go back to a checkpoint, after an error or within a step; leave their losses.

Beside each stand those of an engine that knows nothing of what went wrong.
"""

import sys
from itertools import count
from pathlib import Path

import torch
from common import QUIET, build_gpt2, configuration, leave, token_batches
from deepspeed import PipelineModule
from torch.nn import Linear
from torch.nn.functional import mse_loss

import wavemare
from wavemare.errors import CheckpointError, NumericsError

GUARD = {"guard": {"nonfinite": "stop"}}
PIPELINES = ("1f1b", "pipemare")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Linear(8, 8)

    def forward(self, inputs, labels):
        return mse_loss(self.layer(inputs.to(self.layer.weight.dtype)).float(), labels)


def batches(bad=None):
    """Micro-batches, one of them without a sound number."""
    generator = torch.Generator().manual_seed(3)
    for number in count():
        inputs, labels = (torch.randn(4, 8, generator=generator) for _ in range(2))
        yield inputs * (float("nan") if number == bad else 1.0), labels


def build(schedule=None, **config):
    torch.manual_seed(5)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "wavemare": dict(GUARD),
        "steps_per_print": None,
        **config,
    }
    if schedule is None:
        return wavemare.initialize(model=Model(), config=config)[0]
    config["wavemare"]["pipeline"] = {"stages": 2, "schedule": schedule}
    if schedule == "pipemare":
        config["wavemare"]["pipeline"]["pipemare"] = {"error_feedback": True}
    layers = [Linear(8, 8) for _ in range(2)]
    options = {"num_stages": 2, "loss_fn": mse_loss, "partition_method": "uniform"}
    return wavemare.initialize(model=PipelineModule(layers, **options), config=config)[0]


def train(engine, data, steps=3):
    return [engine.train_batch(data).item() for _ in range(steps)]


def stopped(engine, data, steps=1):
    """Train steps, the first of which the guard refuses, perhaps after the next one."""
    try:
        train(engine, data, steps)
    except NumericsError:
        return True
    return False


def after_a_bad_step(folder, **settings):
    engine, data = build(**settings), batches(bad=6)
    train(engine, data, 2)
    engine.save_checkpoint(folder)
    train(engine, data, 1)
    assert stopped(engine, data, 2 if settings.get("schedule") == "pipemare" else 1)
    torch.distributed.barrier()
    return loaded(engine, folder, **settings)


def within_a_step(folder, **settings):
    engine, data = build(**settings), batches()
    train(engine, data, 2)
    engine.save_checkpoint(folder)
    engine.backward(engine(*next(data)))
    engine.step()
    return loaded(engine, folder, **settings)


def loaded(engine, folder, **settings):
    found = []
    for each in (engine, build(**settings)):
        each.load_checkpoint(folder)
        found.append(train(each, batches()))
        each.destroy()
    return found


def spoiled_step(engine, data):
    """Train a step of which all numbers are bad; return whether the guard has refused it."""
    scale = engine.module.transformer.ln_f.weight
    kept = scale.detach().clone()
    scale.data.fill_(float("nan"))
    refused = stopped(engine, iter(data))
    scale.data.copy_(kept)
    return refused


def synchronous_waves(folder, rank):
    """They go back after a step that was refused, and on as an engine that never met it."""
    tokens = token_batches(rank)
    data = [{"input_ids": ids, "labels": ids} for ids in (next(tokens) for _ in range(6))]
    found = []
    for fails in (True, False):
        config = configuration(0)
        config["gradient_accumulation_steps"] = 2
        config["wavemare"] = {"wavelet": {"mode": "sync"}, **GUARD}
        engine, *_ = wavemare.initialize(model=build_gpt2(**QUIET, use_cache=False), config=config)
        stream = iter(data[:2])
        losses = [engine.train_batch(stream).item()]
        if fails:
            engine.save_checkpoint(folder)
            assert spoiled_step(engine, data[2:4])
            engine.load_checkpoint(folder)
        stream = iter(data[2:])
        losses += [engine.train_batch(stream).item() for _ in range(2)]
        found.append(losses)
        engine.destroy()
    return found


def nothing_there(folder, tag):
    """A load that finds nothing drops what was read ahead no more than `drain` does."""
    found = []
    for loads in (True, False):
        engine, data = build("pipemare"), batches()
        losses = train(engine, data)
        if not loads:
            engine.drain()
        else:
            try:
                assert engine.load_checkpoint(folder, tag=tag)[0] is None
            except CheckpointError:
                assert tag is not None
        found.append(losses + train(engine, data))
        engine.destroy()
    return found


if __name__ == "__main__":
    wavemare.init_distributed()
    rank, folder = torch.distributed.get_rank(), Path(sys.argv[1])
    result = {"waves, sync": synchronous_waves(folder / "waves", rank)}
    for stage in range(4):
        zero = {"zero_optimization": {"stage": stage}, "wall_clock_breakdown": True}
        result[f"bad, ZeRO {stage}"] = after_a_bad_step(folder / f"bad{stage}", **zero)
        result[f"open, ZeRO {stage}"] = within_a_step(folder / f"open{stage}", **zero)
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    zero = {"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False}
    result["open, offload"] = within_a_step(folder / "offload", **zero)
    half = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    result["bad, bf16"] = after_a_bad_step(folder / "bf16", **half)
    for schedule in PIPELINES:
        result[f"bad, {schedule}"] = after_a_bad_step(folder / schedule, schedule=schedule)
    (folder / "empty").mkdir(exist_ok=True)
    for tag in (None, "none"):
        result[f"nothing there, {tag}"] = nothing_there(folder / "empty", tag)
    leave(result)
