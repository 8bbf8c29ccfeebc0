# SPDX-License-Identifier: Apache-2.0
"""Train asynchronous pipelines with and without activation checkpointing; leave the differences.

Arguments: folder, number of stages.
"""

import sys

import deepspeed
import torch
from common import leave

import wavemare
from wavemare.engine import init_distributed

STEPS, WIDTH, SIZE = 6, 16, 2
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


def batches():
    generator = torch.Generator().manual_seed(1)
    while True:
        inputs = torch.randn(SIZE, WIDTH, generator=generator)
        yield inputs, torch.sin(3 * inputs)


def train(num_stages, checkpointing, mode, dropout):
    torch.manual_seed(7)
    module = deepspeed.PipelineModule(
        [build_layer(dropout) for _ in range(2 * num_stages)],
        num_stages=num_stages,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    forwards = []
    for layer in module.forward_funcs:
        layer.register_forward_hook(lambda *_: forwards.append(1))
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "pipeline": KINDS[checkpointing],
        "wavemare": {
            "pipeline": {
                "schedule": "pipemare",
                "stages": num_stages,
                "pipemare": {"discrepancy_correction": {"mode": mode}},
            }
        },
    }
    engine = wavemare.initialize(model=module, config=config)[0]
    torch.manual_seed(100 + engine.stage_id)
    data = batches()
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    count = len(forwards)
    engine.drain()
    return [p.detach().clone() for p in engine.module.parameters()], losses, count


def compare(num_stages, checkpointing, mode, dropout):
    plain, expected, once = train(num_stages, "none", mode, dropout)
    weights, losses, count = train(num_stages, checkpointing, mode, dropout)
    return {
        "weights": max(float((a - b).abs().max()) for a, b in zip(plain, weights, strict=True)),
        "losses": max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
        "forwards": [once, count],
        "last": expected[-1],
    }


def main() -> None:
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


if __name__ == "__main__":
    main()
