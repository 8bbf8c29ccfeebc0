# SPDX-License-Identifier: Apache-2.0
"""Engines that are destroyed while something is under way; leave which of them live on."""

import gc
import weakref

import torch
from common import leave
from deepspeed import DualPipeVModule, PipelineModule
from torch.nn import Linear
from torch.nn.functional import mse_loss

import wavemare

SECTIONS = {
    "dualpipev": {},
    "1f1b": {"pipeline": {"stages": 2}},
    "pipemare": {"pipeline": {"stages": 2, "schedule": "pipemare"}},
    "guarded": {"pipeline": {"stages": 2, "schedule": "pipemare"}, "guard": {"nonfinite": "stop"}},
}


def batches():
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


def trained(sections):
    """Return a weak reference to an engine that has trained and was destroyed."""
    kind = PipelineModule if "pipeline" in sections else DualPipeVModule
    layers = [Linear(8, 8) for _ in range(4)]
    model = kind(layers, num_stages=2, loss_fn=mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "wavemare": sections,
    }
    engine, *_ = wavemare.initialize(model=model, config=config)
    data = batches()
    for _ in range(3):
        engine.train_batch(data)
    engine.destroy()
    return weakref.ref(engine)


if __name__ == "__main__":
    wavemare.init_distributed()
    alive = []
    for name, sections in SECTIONS.items():
        engine = trained(sections)
        gc.collect()
        torch.distributed.barrier()  # its messages arrive before the next engine's groups are made
        if engine() is not None:
            alive.append(name)
    leave(alive)
