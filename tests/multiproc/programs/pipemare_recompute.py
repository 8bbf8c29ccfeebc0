# SPDX-License-Identifier: Apache-2.0
"""Train asynchronous pipelines with and without activation checkpointing; leave the differences.

Arguments: folder, number of stages.
"""

import sys

import torch
from common import furthest, leave, sine_batches, start_stages

from wavemare.engine import init_distributed

STEPS, WIDTH = 6, 16
KINDS = {
    "none": {},
    "non-reentrant": {"activation_checkpoint_interval": 1, "use_reentrant": False},
    "reentrant": {"activation_checkpoint_interval": 1, "use_reentrant": True},
}


def build_layer(dropout):
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Dropout(dropout),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, WIDTH),
    )


def train(num_stages, checkpointing, mode, dropout):
    torch.manual_seed(7)
    engine = start_stages(
        [build_layer(dropout) for _ in range(2 * num_stages)],
        stages=num_stages,
        micro_batches=1,
        section={"schedule": "pipemare", "pipemare": {"discrepancy_correction": {"mode": mode}}},
        pipeline=KINDS[checkpointing],
    )
    forwards = []
    for layer in engine.module.forward_funcs:
        layer.register_forward_hook(lambda *_: forwards.append(1))
    torch.manual_seed(100 + engine.stage_id)
    data = sine_batches(WIDTH)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    count = len(forwards)
    engine.drain()
    return [p.detach().clone() for p in engine.module.parameters()], losses, count


def compare(num_stages, checkpointing, mode, dropout):
    plain, expected, once = train(num_stages, "none", mode, dropout)
    weights, losses, count = train(num_stages, checkpointing, mode, dropout)
    return {
        "weights": furthest(plain, weights),
        "losses": max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
        "forwards": [once, count],
        "last": expected[-1],
    }


if __name__ == "__main__":
    init_distributed()
    num_stages = int(sys.argv[2])
    leave(
        {
            f"{checkpointing} {mode} {dropout}": compare(num_stages, checkpointing, mode, dropout)
            for checkpointing in ("non-reentrant", "reentrant")
            for mode in ("exact", "off")
            for dropout in (0.0, 0.2)
        }
    )
