# SPDX-License-Identifier: Apache-2.0
"""DPO by engines of several ranks, beside a loop in this process that knows pairs alone.

Usage: preferences.py FOLDER CASES; CASES is a JSON object of keyword arguments by name.
"""

import copy
import json
import sys
from functools import partial

import peft
import torch
import transformers
from common import build_moe, difference, leave
from torch import distributed as dist
from torch.nn.functional import logsigmoid

import wavemare
from wavemare.data.chat import Row
from wavemare.data.loader import ResumableLoader
from wavemare.data.preferences import PairSamples
from wavemare.hf.preferences import PreferenceLoss
from wavemare.models import whole_state_dict
from wavemare.recipes.llama.dpo import dpo_loss, log_probabilities
from wavemare.training.evaluation import evaluate, evaluation_loader
from wavemare.training.preferences import inputs_of

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
PAIRS, MICRO, LENGTH, RATE, BETA, STEPS = 8, 2, 14, 0.2, 0.5, 3
CLIP = 1.0


def build(*, lora=True, moe=False):
    transformers.set_seed(7)
    if moe:
        model = build_moe(auxiliary=True, num_hidden_layers=4)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if not lora:
        return model
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def make_pairs(count=PAIRS):
    """Prompts with two answers each, as tokens: (tokens, where the answer begins)."""
    draw = torch.Generator().manual_seed(4)

    def tokens(least, most):
        length = int(torch.randint(least, most, (1,), generator=draw))
        return torch.randint(1, 50, (length,), generator=draw).tolist()

    pairs = []
    for _ in range(count):
        prompt = tokens(2, 6)
        pairs.append([(prompt + tokens(1, 8), len(prompt)) for _ in range(2)])
    return pairs


def make_samples(pairs):
    rows = [Row(ids, [-100] * start + ids[start:]) for pair in pairs for ids, start in pair]
    return PairSamples(rows, LENGTH, 0)


def answer(model, row):
    """The log-probability of an answer, token by token, of a row that is alone in its batch."""
    ids, start = row
    scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(scores[place - 1, ids[place]] for place in range(start, len(ids)))


def routed(model, batch):
    """The routers' loss of a micro-batch: it is no mean over rows."""
    rows = [row for pair in batch for row in pair]
    filled = torch.tensor([ids + [0] * (LENGTH - len(ids)) for ids, _ in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (LENGTH - len(ids)) for ids, _ in rows])
    return model.router_aux_loss_coef * model(filled, attention_mask=mask).aux_loss


def alone(pairs, order, **keys):
    """Train in this process; return losses, figures and weights.

    Args:
        pairs: Of `make_pairs`.
        order: The places of the pairs of each micro-batch of a step, of all ranks.
        keys: Of `build`.
    """
    model = build(**keys)
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses, figures = [], []

    def measure(batch):
        rewards = torch.stack(
            [
                torch.stack([BETA * (answer(model, row) - answer(reference, row)) for row in pair])
                for pair in batch
            ]
        )
        chosen, rejected = rewards[:, 0], rewards[:, 1]
        right = (chosen > rejected).float()
        found = [x.mean().item() for x in (chosen, rejected, chosen - rejected, right)]
        loss = -logsigmoid(chosen - rejected).mean()
        return loss + (routed(model, batch) if keys.get("moe") else 0), found

    for step in order:
        found = [measure([pairs[place] for place in batch]) for batch in step]
        loss = sum(each for each, _ in found) / len(found)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        figures.append(torch.tensor([each for _, each in found]).mean(0).tolist())
    with torch.no_grad():
        evaluation, _ = measure(pairs)
    return losses, figures, evaluation.item(), model.state_dict()


def train(*, zero=0, stages=1, ranks=1, section=None, **keys):
    """Train by an engine; return how far it is from `alone`."""
    pairs = make_pairs()
    samples = make_samples(pairs)
    model = build(**keys)
    section, inputs = dict(section or {}), list(inputs_of(model.config))
    if stages > 1:
        section["pipeline"] = {"stages": stages, "inputs": inputs, **section.get("pipeline", {})}
    config = {
        "train_batch_size": PAIRS,
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "wavemare": section,
    }
    engine, *_ = wavemare.initialize(model=model, config=config)
    loss = PreferenceLoss(engine, log_probabilities, partial(dpo_loss, beta=BETA), inputs)
    samples.reference = loss.log_probs_of(samples)
    batches = loss.batches(ResumableLoader.of(engine, samples, seed=3))
    losses, figures = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(batches)))
        figures.append([*loss.take_rewards().values()])
    evaluation = evaluate(engine, [*loss.batches(evaluation_loader(engine, samples))])
    evaluated = loss.take_rewards(training=False)
    trained = whole_state_dict(engine.module) or {}
    engine.destroy()
    places = ResumableLoader(
        range(PAIRS), micro_batch_size=MICRO, data_rank=0, data_world_size=1, seed=3
    )
    order = [[next(places).tolist() for _ in range(PAIRS // MICRO)] for _ in range(STEPS)]
    expected = alone(pairs, order, **keys)
    found = {
        "losses": furthest(losses, expected[0]),
        "figures": furthest(figures, expected[1]),
        "learned": losses[0] - losses[-1],
        "evaluated": sorted(evaluated),
    }
    if not keys.get("moe"):  # its micro-batches are others
        found["evaluation"] = abs(evaluation - expected[2])
    if dist.get_rank() == 0:
        found["weights"] = difference(trained, expected[3])
    return found


def furthest(found, expected):
    return float((torch.tensor(found) - torch.tensor(expected)).abs().max())


if __name__ == "__main__":
    wavemare.init_distributed()
    leave({name: train(**case) for name, case in json.loads(sys.argv[2]).items()})
