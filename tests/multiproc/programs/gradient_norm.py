# SPDX-License-Identifier: Apache-2.0
"""The gradient norm that engines report and clip by, beside plain torch's.

Arguments: folder, and a JSON object of [property, settings] by name.
"""

import json
import sys
from itertools import islice
from unittest import mock

import deepspeed
import torch
from common import (
    ACCUMULATION,
    HIDDEN,
    MICRO,
    QUIET,
    VOCABULARY,
    AllRanks,
    build_gpt2,
    configuration,
    furthest,
    leave,
    token_batches,
    train_plainly,
)
from deepspeed.utils import groups

import wavemare
from wavemare.engine import init_distributed

STEPS = 3
LIMIT = 0.2


def batches(rank):
    for tokens in token_batches(rank):
        yield {"input_ids": tokens, "labels": tokens}


def reported(*, zero=0, clip=0.0, ours=None, replicas=False, **changes):
    """The norms that an engine reports, and those of plain torch on the first step's weights."""
    groups.mpu = None
    section = {} if ours is None else {"wavemare": ours}
    config = configuration(zero, gradient_clipping=clip, **section, **changes)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05}}
    config["zero_allow_untested_optimizer"] = True
    del config["scheduler"]
    tied = (ours or {}).get("pipeline", {}).get("schedule") != "pipemare"
    engine = wavemare.initialize(model=build_gpt2(**QUIET, tie_word_embeddings=tied), config=config)
    engine = engine[0]
    norms = [engine.get_global_grad_norm()]
    data = batches(engine.data_rank)
    for _ in range(STEPS):
        engine.train_batch(data)
        norms.append(engine.get_global_grad_norm())
    ranks = [engine.data_rank] if replicas else range(engine.data_world_size)
    engine.destroy()
    twin = build_gpt2(**QUIET, tie_word_embeddings=tied)
    parts = ({"parts": both} for both in zip(*(batches(rank) for rank in ranks), strict=True))
    _, expected = train_plainly(
        AllRanks(twin),
        torch.optim.SGD(twin.parameters(), lr=0.05),
        parts,
        steps=STEPS,
        micro_batches=ACCUMULATION,
        clip=clip or float("inf"),
    )
    return {"norms": norms, "expected": expected}


def measurements(zero):
    """How often DeepSpeed's optimizer measures in three steps, with a guard and clipping."""
    groups.mpu = None
    config = configuration(zero, wavemare={})
    engine = wavemare.initialize(model=build_gpt2(**QUIET), config=config)[0]
    kind, calls = type(engine.optimizer), []
    stock = kind.scaled_global_norm

    def counted(optimizer, *args, **kwargs):
        calls.append(1)
        return stock(optimizer, *args, **kwargs)

    with mock.patch.object(kind, "scaled_global_norm", counted):
        data = batches(engine.data_rank)
        for _ in range(STEPS):
            engine.train_batch(data)
    return len(calls)


def hand_made(ours):
    """A pipeline of the caller's own layers without our section: DeepSpeed's clipping, our norm."""
    groups.mpu = None
    engine, twin, data = stages(ours, sparse=False)
    losses = [next(data) for _ in range(ACCUMULATION)]
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.train_batch(iter(losses))
    whole_norm = plain_step(twin, losses)
    moved = [b - p.detach() for b, p in zip(before, engine.module.parameters(), strict=True)]
    marks = [name for name, p in engine.module.named_parameters() if hasattr(p, "model_parallel")]
    return {
        "norm": engine.get_global_grad_norm(),
        "expected": whole_norm,
        "moved": float(torch.stack([each.norm() for each in moved]).norm()),
        "marks": marks,
    }


def layers_of(*, sparse):
    torch.manual_seed(7)
    return [
        torch.nn.Embedding(VOCABULARY, HIDDEN, sparse=sparse),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.Tanh(),
        torch.nn.Linear(HIDDEN, VOCABULARY),
    ]


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def repeating(rank):
    """Micro-batches of few tokens, of which each comes many times."""
    for tokens in token_batches(rank):
        yield tokens % 3, tokens


def stages(ours, *, sparse):
    """Return an engine of two stages, the same layers whole and without sparse gradients, data."""
    module = deepspeed.PipelineModule(
        layers_of(sparse=sparse), num_stages=2, loss_fn=loss_of, partition_method="uniform"
    )
    engine = wavemare.initialize(model=module, config=clipped(ours))[0]
    return engine, torch.nn.Sequential(*layers_of(sparse=False)), repeating(0)


def clipped(ours):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": LIMIT,
        "steps_per_print": None,
        **({} if ours is None else {"wavemare": ours}),
    }


def plain_step(twin, data):
    """Make a clipped step of plain torch; return the norm."""
    for parameter in twin.parameters():
        parameter.grad = None
    for inputs, labels in data:
        (loss_of(twin(inputs), labels) / len(data)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), LIMIT))
    with torch.no_grad():
        torch._foreach_sub_(list(twin.parameters()), [p.grad for p in twin.parameters()])
    return norm


def sparse_stages(ours):
    """Clip an embedding's sparse gradient in which rows repeat."""
    groups.mpu = None
    engine, twin, data = stages(ours, sparse=True)
    norms = []
    for _ in range(STEPS):
        step = list(islice(data, ACCUMULATION))
        engine.train_batch(iter(step))
        norms.append([engine.get_global_grad_norm(), plain_step(twin, step)])
    whole = list(twin.parameters())
    count = len(list(engine.module.parameters()))
    own = whole[:count] if engine.stage_id == 0 else whole[-count:]
    return {"norms": norms, "apart": furthest(engine.module.parameters(), own)}


class Whole(torch.nn.Sequential):
    def forward(self, inputs, labels):
        return loss_of(super().forward(inputs), labels)


def sparse_data_parallel():
    """The same with data ranks, whose sparse gradients DeepSpeed gathers."""
    groups.mpu = None
    model = Whole(*layers_of(sparse=True))
    engine = wavemare.initialize(model=model, config=clipped({}))[0]
    twin = torch.nn.Sequential(*layers_of(sparse=False))
    data, norms = [repeating(rank) for rank in range(engine.data_world_size)], []
    for _ in range(STEPS):
        steps = [list(islice(each, ACCUMULATION)) for each in data]
        engine.train_batch(iter(steps[engine.data_rank]))
        every = [batch for step in steps for batch in step]
        norms.append([engine.get_global_grad_norm(), plain_step(twin, every)])
    return {"norms": norms, "apart": furthest(engine.module.parameters(), twin.parameters())}


if __name__ == "__main__":
    init_distributed()
    cases = json.loads(sys.argv[2])
    leave({key: globals()[name](**settings) for key, (name, settings) in cases.items()})
