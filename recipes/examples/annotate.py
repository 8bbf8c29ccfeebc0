# SPDX-License-Identifier: Apache-2.0
"""A layout by names: which modules make which stage of the pipeline.

wavemare launch --nproc 2 recipes/examples/annotate.py
"""

from itertools import cycle

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import wavemare

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "steps_per_print": None,
    "wavemare": {},
}


def main() -> None:
    """Train a tiny GPT-2 to count, with a short first and a long second stage."""
    set_seed(1)
    config = GPT2Config(
        vocab_size=8, n_positions=16, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    wavemare.annotate(
        model,
        {
            "stages": {"front": ["embed", "layers.0"], "back": ["layers.1-3", "head"]},
            "pipeline": {"micro_batches": 2},
        },
    )
    rows = (torch.arange(64)[:, None] + torch.arange(16)) % 8
    batches = cycle({"input_ids": part, "labels": part} for part in rows.split(4))

    engine, *_ = wavemare.initialize(model=model, config=CONFIG)
    if engine.global_rank == 0:
        print(engine.layout)
    for step in range(1, 13):
        loss = engine.train_batch(batches)
        if step % 4 == 0 and engine.global_rank == 0:
            print(f"step {step}: loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
