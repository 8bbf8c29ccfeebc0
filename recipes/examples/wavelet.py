# SPDX-License-Identifier: Apache-2.0
"""Layers split over two ranks, whose exchange runs behind a second wave of micro-batches (Wavelet).

wavemare launch --nproc 2 recipes/examples/wavelet.py
"""

from itertools import cycle

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import wavemare

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "steps_per_print": None,
    "wavemare": {
        "tensor_parallel": {"size": 2},
        "wavelet": {"mode": "sync"},  # "auto" measures whether waves pay, and does without if not
    },
}


def main() -> None:
    """Train a tiny GPT-2 to count."""
    set_seed(1)
    config = GPT2Config(
        vocab_size=8,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    rows = (torch.arange(64)[:, None] + torch.arange(16)) % 8
    batches = cycle({"input_ids": part, "labels": part} for part in rows.split(4))

    engine, *_ = wavemare.initialize(model=model, config=CONFIG)
    for step in range(1, 13):
        loss = engine.train_batch(batches)
        if step % 4 == 0 and engine.global_rank == 0:
            print(f"step {step}: loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
