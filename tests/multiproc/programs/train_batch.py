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


if __name__ == "__main__":
    init_distributed()
    digests = [train(make(), cut=cut) for cut in (False, True)]
    engine = make()
    refused = refusals(make())
    leave({"digests": digests, "evaluation": evaluate(engine), "refusals": refused})
