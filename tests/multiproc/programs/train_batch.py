# SPDX-License-Identifier: Apache-2.0
"""Data that ends too early, evaluations, and what the guard keeps of them.

Usage: train_batch.py FOLDER. On each rank.
"""

import gc
import weakref
from collections import namedtuple
from itertools import islice

import torch
from common import ACCUMULATION, build_gpt2, configuration, leave, token_batches, weights_digest
from deepspeed import checkpointing
from transformers.modeling_outputs import CausalLMOutput

import wavemare
from wavemare.engine import init_distributed
from wavemare.errors import DataError

Unlabelled = namedtuple("Unlabelled", ["input_ids", "past_key_values"])


def make(**ours):
    torch.manual_seed(3)
    config = configuration(1, wavemare={"guard": {}, **ours})
    engine = wavemare.initialize(model=build_gpt2(), config=config)[0]
    engine.rank_batches = [
        {"input_ids": tokens, "labels": tokens}
        for tokens in islice(token_batches(torch.distributed.get_rank()), 4 * ACCUMULATION)
    ]
    return engine


def train(engine, *, cut):
    """Train two steps; between them data that ends within a step, or nothing."""
    batches = engine.rank_batches
    engine.train_batch(iter(batches[:ACCUMULATION]))
    if cut:
        try:
            engine.train_batch(iter(batches[: ACCUMULATION - 1]))
        except StopIteration:
            pass
        else:
            raise AssertionError("a step of too few micro-batches")
    engine.train_batch(iter(batches[ACCUMULATION:]))
    return weights_digest(engine)


def evaluate(engine):
    """What the guard keeps of evaluations, and of a training's forward pass."""
    ended, batches = False, engine.rank_batches
    kept = [weakref.ref(batch["input_ids"]) for batch in batches]
    engine.train()
    try:
        engine.eval_batch(iter(batches[:1]), num_micro_batches=2)
    except StopIteration:
        ended = True
    training = engine.module.training
    engine.eval()
    for batch in batches[:3]:
        engine(**batch)
    engine.train()
    engine(**batches[-1])
    del batch, batches
    engine.rank_batches.clear()
    gc.collect()
    return {
        "ended": ended,
        "training": training,
        "kept of evaluations": sum(each() is not None for each in kept[:3]),
        "kept of training": int(kept[-1]() is not None),
    }


def refusals(engine):
    unlabelled = [Unlabelled(batch["input_ids"], None) for batch in engine.rank_batches]
    said = []
    for data in (None, iter(unlabelled)):
        try:
            engine.train_batch(data)
        except DataError as error:
            said.append(f"{error.key}: {error.reason}")
    return said


class Checkpointed(torch.nn.Module):
    """A linear layer that DeepSpeed's function computes again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return checkpointing.checkpoint(self.linear, x).sum()


def evaluate_with_contiguous_checkpoints():
    """Evaluate more batches than there are buffers; whether the losses are the layer's own."""
    config = configuration(1, wavemare={"guard": {}}, zero_optimization={"stage": 0})
    engine = wavemare.initialize(model=Checkpointed(), config=config)[0]
    x = torch.ones(2, 4, device=engine.device)
    expected = float(engine.module.linear(x).sum())
    contiguous = dict.fromkeys(("partition_activations", "contiguous_checkpointing"), True)
    checkpointing.configure(None, **contiguous, num_checkpoints=ACCUMULATION)
    losses = []
    for number in (1, 3 * ACCUMULATION):
        data = (x.clone() for _ in range(number))  # such checkpoints take the data of their inputs
        losses.append(engine.eval_batch(data, num_micro_batches=number))
    checkpointing.configure(None)
    return [abs(float(loss) - expected) < 1e-5 for loss in losses]


class Returning(torch.nn.Module):
    """A linear layer whose loss and outputs are returned in a form."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.form = torch.nn.Linear(4, 4), form

    def forward(self, x):
        logits = self.linear(x)
        loss = logits.square().sum()
        return (loss, logits) if self.form is tuple else self.form(loss=loss, logits=logits)


def forms_of_outputs():
    """Losses and logits of models that return a tuple, a mapping and an output of transformers."""
    found, config = [], configuration(1, wavemare={"guard": {}})
    for form in (tuple, dict, CausalLMOutput):
        engine = wavemare.initialize(model=Returning(form), config=config)[0]
        data = [torch.full((2, 4), float(n), device=engine.device) for n in range(ACCUMULATION)]
        losses = [float(engine.train_batch(iter(data))) for _ in range(3)]
        loss, logits = engine.eval_batch(iter(data), return_logits=True)
        found.append([*losses, float(loss), logits.tolist()])
    return found


if __name__ == "__main__":
    init_distributed()
    digests = [train(make(), cut=cut) for cut in (False, True)]
    engine = make()
    refused = refusals(make())
    contiguous = evaluate_with_contiguous_checkpoints()
    found = {"digests": digests, "refusals": refused, "contiguous checkpoints": contiguous}
    found["forms"] = forms_of_outputs()
    leave(found | {"evaluation": evaluate(engine)})
