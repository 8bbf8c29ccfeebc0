# SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule of one's own: written as data, checked, drawn and trained with.

wavemare launch --nproc 2 recipes/examples/custom_schedule.py
"""

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

import wavemare
from wavemare.pipeline.draw import grid
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.plan import Action, Kind, Plan

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "steps_per_print": None,
    "wavemare": {},
}


def gpipe(num_ranks: int, micro_batches: int) -> Plan:
    """Return GPipe's order of passes: all forward passes, then all backward passes."""
    kinds = Kind.FORWARD, Kind.BACKWARD
    ranks = tuple(
        tuple(Action(kind, rank, number) for kind in kinds for number in range(micro_batches))
        for rank in range(num_ranks)
    )
    # The optimizer step, sends, receives and loads follow from the order of the passes.
    return Plan("gpipe", num_ranks, micro_batches, 1, ranks)


def main() -> None:
    """Train two stages by GPipe's schedule."""
    wavemare.init_distributed()
    torch.manual_seed(1)
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine, *_ = wavemare.initialize(model=model, config=CONFIG, plan=gpipe)
    inputs = torch.randn(32, 8)
    batches = [(part, torch.sin(part)) for part in inputs.split(8)]
    if engine.global_rank == 0:
        print(check(engine.plan), grid(engine.plan), sep="\n")
    for step in range(1, 21):
        loss = engine.train_batch(iter(batches))
        if step % 5 == 1 and engine.global_rank == 0:
            print(f"step {step}: loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
