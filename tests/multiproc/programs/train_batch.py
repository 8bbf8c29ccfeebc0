# SPDX-License-Identifier: Apache-2.0
"""Data that ends too early, evaluations, and what the guard keeps of them.

Usage: train_batch.py FOLDER. On each rank.
"""

from itertools import islice

import torch
from common import ACCUMULATION, build_gpt2, configuration, leave, token_batches, weights_digest

import wavemare
from wavemare.engine import init_distributed
from wavemare.errors import DataError


def make(**ours):
    torch.manual_seed(3)
    config = configuration(1, wavemare={"guard": {}, **ours})
    engine = wavemare.initialize(model=build_gpt2(), config=config)[0]
    engine.rank_batches = [
        {"input_ids": tokens, "labels": tokens}
        for tokens in islice(token_batches(torch.distributed.get_rank()), 4 * ACCUMULATION)
    ]
    return engine


def train(engine, *, cut: bool) -> str:
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


def evaluate(engine) -> dict[str, object]:
    engine.train()
    try:
        engine.eval_batch(iter(engine.rank_batches[:1]), num_micro_batches=2)
    except StopIteration:
        ended = True
    kept_before = len(engine._guard._records)
    engine.eval()
    for batch in engine.rank_batches[:3]:
        engine(**batch)
    kept = len(engine._guard._records) - kept_before
    engine.train()
    engine(**engine.rank_batches[0])
    return {
        "ended": ended,
        "training": engine.module.training,
        "kept of evaluations": kept,
        "kept of training": len(engine._guard._records) - kept_before,
    }


def refusals(engine) -> list[str]:
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in engine.rank_batches]
    said = []
    for data in (None, iter(unlabelled)):
        try:
            engine.train_batch(data)
        except DataError as error:
            said.append(f"{error.key}: {error.reason}")
    return said


def main() -> None:
    init_distributed()
    digests = [train(make(), cut=cut) for cut in (False, True)]
    engine = make()
    refused = refusals(make())
    leave({"digests": digests, "evaluation": evaluate(engine), "refusals": refused})


main()
