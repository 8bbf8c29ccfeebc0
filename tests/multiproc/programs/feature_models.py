# SPDX-License-Identifier: Apache-2.0
"""The models that `schedule_features` trains, their batches, and a model's loss of a batch."""

from itertools import pairwise

import peft
import torch
from common import QUIET, build_gpt2, build_moe, token_batches
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

WIDTH, SIZE = 8, 2
LONGEST = 96
"""Tokens of a packed row."""


def gpt2(**changes):
    return build_gpt2(**QUIET, **{"tie_word_embeddings": False, "use_cache": False, **changes})


def lora(**changes):
    chosen = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    chosen |= changes
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, **chosen))


def steady_moe():
    """Return a mixture whose tokens take all experts: sums in another order choose no others."""
    return build_moe(num_experts_per_tok=4)


def half_frozen():
    model = gpt2()
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    return model


def looked_up():
    return [
        nn.Embedding(30, WIDTH, sparse=True),
        *[nn.Linear(WIDTH, WIDTH) for _ in range(5)],
    ]


class Seeded(nn.Linear):
    """A layer that has the same weights on whichever rank it is built."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(WIDTH, WIDTH)


def tied_inside():
    tied = [
        TiedLayerSpec("twice", Seeded, 0, tied_weight_attr=["weight", "bias"]) for _ in range(2)
    ]
    return [*tied, *[LayerSpec(Seeded, seed) for seed in range(1, 5)]]


def tokens_of(rank):
    for tokens in token_batches(rank):
        yield {"input_ids": tokens, "labels": tokens}


def of_many_lengths(rank):
    for number, tokens in enumerate(token_batches(rank)):
        part = tokens[:, : 5 + 3 * (number % 4)].contiguous()
        yield {"input_ids": part, "labels": part}


def packed(rank):
    """Yield samples of rows of many lengths, the last of which ends with its sample.

    They are long enough for rows to be attended to one by one.
    """
    draw, batches = torch.Generator().manual_seed(40 + rank), token_batches(rank)
    while True:
        tokens = torch.cat([next(batches) for _ in range(16)], dim=1)
        starts = torch.rand(tokens.shape, generator=draw).to(tokens.device) < 0.02
        starts[:, ::LONGEST] = True
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        positions = place - place.masked_fill(~starts, 0).cummax(-1).values
        labels = tokens.masked_fill(positions == 0, -100)
        yield {"input_ids": tokens, "position_ids": positions, "labels": labels}


def loss_of_batch(model, batch):
    return model(**batch, use_cache=False).loss


def loss_of_rows(model, batch):
    """Return the mean loss over the labels of packed rows, each of which is a batch of its own."""
    total, count = 0.0, 0
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(ids)]
        for row in ids.split([b - a for a, b in pairwise(starts)]):
            if len(row) > 1:
                labels = len(row) - 1
                total = total + labels * model(row[None], labels=row[None], use_cache=False).loss
                count += labels
    return total / count


def pairs(rank, *, ids=False):
    generator = torch.Generator().manual_seed(30 + rank)
    while True:
        target = torch.randn(SIZE, WIDTH, generator=generator)
        inputs = (
            torch.randint(0, 4, (SIZE,), generator=generator)
            if ids
            else torch.randn(SIZE, WIDTH, generator=generator)
        )
        yield inputs, target
