# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Trainer script with another import, trained as a pipeline of two stages.

wavemare launch --nproc 2 recipes/examples/trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from wavemare.hf import Trainer

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 0},
    "wavemare": {"pipeline": {"stages": "auto", "schedule": "1f1b"}},
}


def main() -> None:
    """Train a tiny GPT-2 to count, and evaluate it."""
    set_seed(1)
    config = GPT2Config(
        vocab_size=8, n_positions=16, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    rows = (torch.arange(64)[:, None] + torch.arange(16)) % 8
    data = [{"input_ids": row, "labels": row} for row in rows]

    arguments = TrainingArguments(
        "build/trainer-example",
        deepspeed=CONFIG,
        use_cpu=not torch.cuda.is_available(),
        max_steps=12,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    found = trainer.evaluate()
    if arguments.process_index == 0:
        print(f"validation loss {found['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
