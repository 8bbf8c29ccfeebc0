# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed script with another import: ``forward``, ``backward`` and ``step`` as before.

wavemare launch --nproc 2 recipes/examples/deepspeed_script.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import wavemare

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": None,
}


def main() -> None:
    """Train a tiny GPT-2 to count."""
    set_seed(1)
    config = GPT2Config(
        vocab_size=8, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    rows = (torch.arange(64)[:, None] + torch.arange(16)) % 8
    data = [{"input_ids": row, "labels": row} for row in rows]

    engine, _, loader, _ = wavemare.initialize(model=model, training_data=data, config=CONFIG)
    for epoch in range(3):
        for batch in loader:
            inputs = {name: values.to(engine.device) for name, values in batch.items()}
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
