# SPDX-License-Identifier: Apache-2.0
"""Tiny models to be annotated, and their plans."""

import transformers

from wavemare.parallel.layout.execute import compile_layout

BATCH = {"train_micro_batch_size_per_gpu": 2}


def gpt2(layers=4, **changes):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=20, n_positions=8, n_embd=8, n_layer=layers, n_head=2, **changes
        )
    )


def bert():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
    )


def plan(model, world_size, **config):
    return compile_layout(model, {**BATCH, **config}, world_size=world_size)
