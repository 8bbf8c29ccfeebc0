# SPDX-License-Identifier: Apache-2.0
"""Train asynchronous pipelines in real processes, and each again in one, version by version.

Arguments: folder, number of stages, steps, JSON list of cases (micro_batches, optimizer, t1,
correction, drain_interval, warmup_steps).
"""

import json
import sys
from itertools import islice

import torch
from common import furthest, leave, sine_batches, split_stages, start_stages

from wavemare.engine import init_distributed
from wavemare.pipeline.optim.soap_muon import SOAP, Muon
from wavemare.pipeline.staleness.replay import Replay

WIDTH, SIZE = 8, 3
STEPS = int(sys.argv[3])
ANNEAL = 3 * STEPS // 5


def dtype_of(case):
    """Fp64 where the last bit of fp32 grows: Muon rounds to bf16, feedback repeats differences."""
    grows = case["optimizer"] == "muon" or case.get("error_feedback", False)
    return torch.float64 if grows else torch.float32


def make_muon(parameters, **settings):
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return Muon(groups, **settings)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.003, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.003, "betas": (0.99, 0.999)}),
    # What the policy makes of AdamW.
    "soap": (SOAP, {"lr": 0.003, "weight_decay": 0.1, "stage_aware": False}),
    "muon": (make_muon, {"lr": 0.003, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}),
}


def build_layers(num_stages, dtype):
    torch.manual_seed(5)
    layers = []
    for _ in range(num_stages):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Tanh()]
        layers.append(torch.nn.Linear(WIDTH, WIDTH))
    return [layer.to(dtype) for layer in layers]


def batches(dtype):
    for inputs, labels in sine_batches(WIDTH, size=SIZE, seed=11, dtype=dtype):
        yield inputs, labels.roll(1, dims=1)


def train(num_stages, case):
    name, micro_batches = case["optimizer"], case["micro_batches"]
    kind, settings = OPTIMIZERS[name]
    dtype = dtype_of(case)
    asynchronous = {
        "lr_rescheduling": {"enabled": case["t1"], "anneal_steps": ANNEAL},
        "discrepancy_correction": {"mode": case["correction"]},
        "drain_interval": case.get("drain_interval", 0),
        "warmup_steps": case.get("warmup_steps", 0),
        "slack": case.get("slack", 0),
        "error_feedback": case.get("error_feedback", False),
    }
    engine = start_stages(
        build_layers(num_stages, dtype),
        stages=num_stages,
        size=SIZE,
        micro_batches=micro_batches,
        section={"schedule": "pipemare", "pipemare": asynchronous},
        client_optimizer=lambda parameters: kind(parameters, **settings),
    )
    data = batches(dtype)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    engine.drain()
    return engine, losses


def replay(num_stages, case, **changes):
    kind, settings = OPTIMIZERS[case["optimizer"]]
    dtype = dtype_of(case)
    stages = split_stages(build_layers(num_stages, dtype), num_stages)
    twin = Replay(
        stages,
        torch.nn.functional.mse_loss,
        lambda parameters: kind(parameters, **settings),
        case["micro_batches"],
        correction=case["correction"],
        anneal_steps=ANNEAL if case["t1"] else None,
        drain_interval=changes.get("drain_interval", case.get("drain_interval", 0)),
        warmup_steps=case.get("warmup_steps", 0),
        slack=case.get("slack", 0),
        error_feedback=case.get("error_feedback", False),
    )
    data = batches(dtype)
    losses = [twin.step(list(islice(data, case["micro_batches"]))) for _ in range(STEPS)]
    return stages, losses


def compare(num_stages, case):
    engine, losses = train(num_stages, case)
    stages, expected = replay(num_stages, case)
    flushed, _ = replay(num_stages, case, drain_interval=1)
    weights, stage = list(engine.module.parameters()), engine.stage_id
    return {
        "weights": furthest(weights, stages[stage].parameters()),
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "staleness": furthest(weights, flushed[stage].parameters()),
    }


if __name__ == "__main__":
    init_distributed()
    num_stages, cases = int(sys.argv[2]), json.loads(sys.argv[4])
    leave([compare(num_stages, case) for case in cases])
