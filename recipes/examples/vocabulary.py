# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of 151,936 words: of the table's gradient, only the rows of the batch are sent.

wavemare launch --nproc 2 recipes/examples/vocabulary.py
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import wavemare

WORDS = 151_936
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    # A block is a row of the table, or a part of one.
    "wavemare": {"sparse_collective": {"mode": "auto", "block": 32}},
}


def main() -> None:
    """Train a small Qwen whose head has a table of its own, which is frozen."""
    wavemare.init_distributed()
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.requires_grad_(False)  # the gradient of a head is dense
    engine, *_ = wavemare.initialize(model=model, config=CONFIG)
    generator = torch.Generator().manual_seed(engine.global_rank)
    # Zipf's law: the word number k has the frequency 1 / k.
    words = (WORDS ** torch.rand((2, 64), generator=generator)).long().clamp(max=WORDS - 1)
    for step in range(1, 11):
        loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
        if step % 5 == 0 and engine.global_rank == 0:
            sent = engine.step_metrics()["sparse_bytes_up"] / 1e6
            print(f"step {step}: loss {loss.item():.3f}, sent {sent:.2f} MB")


if __name__ == "__main__":
    main()
