# SPDX-License-Identifier: Apache-2.0
"""Steps whose loss is the mean over their tokens, as engines of two ranks and as one process.

Usage: token_mean.py FOLDER. On each rank.
"""

import copy

import torch
import transformers
from common import leave
from torch import distributed as dist

import wavemare
from wavemare.data.chat import ChatSamples, Row
from wavemare.data.loader import ResumableLoader
from wavemare.engine import init_distributed
from wavemare.hf.steps import TokenMean
from wavemare.models import whole_state_dict
from wavemare.recipes.llama.sft import label_answers
from wavemare.training.evaluation import evaluate

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
BATCH, MICRO, LENGTH, RATE, STEPS = 8, 2, 24, 0.5, 2
LONG = 256
"""Tokens of a packed sample, whose rows are attended to one by one."""


def build():
    transformers.set_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def make_samples(packs):
    """Rows of very unequal numbers of trained tokens."""
    draw = torch.Generator().manual_seed(4)
    rows = []
    for number in range(60):
        length = int(torch.randint(3, 90 if packs else 20, (1,), generator=draw))
        ids = torch.randint(0, 64, (length,), generator=draw).tolist()
        first = 1 if number % 3 else length - 1
        rows.append(Row(ids, [-100] * first + ids[first:]))
    return ChatSamples(rows, LONG if packs else LENGTH, 0, packs=packs, positions=True)


def alone(samples):
    """What one process learns: for each step the sum of all losses by the number of its tokens."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = ResumableLoader(
        samples, micro_batch_size=BATCH, data_rank=0, data_world_size=1, seed=3
    )
    losses = []

    def mean(batch):
        trained, ids = batch.pop("trained")[:, 1:], batch["input_ids"][:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1]
        total = torch.nn.functional.cross_entropy(logits[trained], ids[trained], reduction="sum")
        return total / trained.sum()

    for _ in range(STEPS):
        loss = mean(next(loader))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return [*losses, float(mean(next(loader)))], model.state_dict()


def trained(samples, section, zero):
    ranks = 1 if section else dist.get_world_size()
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "wavemare": section,
    }
    engine, *_ = wavemare.initialize(model=build(), config=copy.deepcopy(config))
    loader = ResumableLoader(
        samples,
        micro_batch_size=MICRO,
        data_rank=engine.data_rank,
        data_world_size=engine.data_world_size,
        seed=3,
    )
    labelled = label_answers(loader)
    token_mean = TokenMean(engine)
    batches = token_mean.weigh_steps(labelled)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    evaluated = [next(labelled) for _ in range(BATCH // MICRO // ranks)]
    losses.append(evaluate(engine, token_mean.weigh(evaluated)))
    state = whole_state_dict(engine)
    engine.destroy()
    return losses, state


def compared(packs, zero=0, **section):
    samples = make_samples(packs)
    (losses, weights), (expected, whole) = trained(samples, section, zero), alone(samples)
    errors = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    moved = build().state_dict()
    for name in whole if weights is not None else ():
        errors.append(float((weights[name] - whole[name]).abs().max()))
        errors.append(0.0 if not torch.equal(whole[name], moved[name]) else 1.0)
    return max(errors)


if __name__ == "__main__":
    init_distributed()
    staged = {"stages": 2, "inputs": ["input_ids", "position_ids"]}
    split = {"tensor_parallel": {"size": 2}}
    leave(
        {
            "zero": compared(False, zero=1),
            "zero, packed": compared(True, zero=1),
            "zero 3, packed": compared(True, zero=3),
            "1f1b, packed": compared(True, pipeline=staged),
            "split, packed": compared(True, **split),
            "waves, packed": compared(True, **split, wavelet={"mode": "sync"}),
        }
    )
