# SPDX-License-Identifier: Apache-2.0
"""A pipeline of two stages that never flushes (PipeMare), from a plain transformers model.

wavemare launch --nproc 2 recipes/examples/pipemare.py
"""

from itertools import cycle

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import wavemare

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "steps_per_print": None,
    "wavemare": {
        # "1f1b" in place of "pipemare" is the synchronous pipeline.
        "pipeline": {"schedule": "pipemare", "stages": 2, "pipemare": {"warmup_steps": 4}}
    },
}


def main() -> None:
    """Train a tiny GPT-2 to count, and export it."""
    set_seed(1)
    config = GPT2Config(
        vocab_size=8, n_positions=16, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    rows = (torch.arange(64)[:, None] + torch.arange(16)) % 8
    batches = cycle({"input_ids": part, "labels": part} for part in rows.split(4))

    engine, *_ = wavemare.initialize(model=model, config=CONFIG)
    for step in range(1, 21):
        loss = engine.train_batch(batches)  # the mean over all micro-batches, on every rank
        if step % 5 == 0 and engine.global_rank == 0:
            staleness = engine.step_metrics().get("staleness_0", 0.0)
            print(f"step {step}: loss {float(loss):.3f}, staleness of stage 0 {staleness:.2f}")
    wavemare.save_pretrained(engine, "build/pipemare-example")


if __name__ == "__main__":
    main()
