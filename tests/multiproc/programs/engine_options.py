# SPDX-License-Identifier: Apache-2.0
"""Engines with an option of torch or DeepSpeed, beside the same model without it.

Arguments: result folder, then a JSON list of [part, argument].
"""

import copy
import json
import sys

import deepspeed
import torch
from common import configuration, furthest, leave, refusal
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from deepspeed.utils import groups
from tensor_models import batch, build
from torch import distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import wavemare

RATE, ROWS, LENGTH = 0.5, 2, 12
SPLIT = {"tensor_parallel": {"size": 2}}
KINDS = {"zero": {"zero": 1}, "stages": {"pipeline": {"stages": 2}}, "split": {**SPLIT, "zero": 1}}


def start(*, zero=0, optimizer="SGD", rate=RATE, bf16=False, mpu=None, **section):
    groups.mpu = None
    config = configuration(zero, gradient_clipping=0.0, bf16={"enabled": bf16}, wavemare=section)
    config |= {"optimizer": {"type": optimizer, "params": {"lr": rate}}}
    del config["scheduler"]
    config["zero_allow_untested_optimizer"] = True
    return wavemare.initialize(model=build("llama"), config=config, mpu=mpu)[0]


def weights(engine):
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().clone() for p in parameters]


def compiled(kind):
    """Two steps that may compile, and two that must not, beside steps that are not compiled."""
    found, model = [], build("llama")
    for compiles in (False, True):
        engine = start(**KINDS[kind])
        blocks = [m for m in engine.module.modules() if "DecoderLayer" in type(m).__name__]
        for block in blocks if kind != "stages" else [engine.module]:  # which compiles layers
            if compiles:
                counters.clear()
                block.compile(backend="aot_eager")
        data = (batch(model, 2 * seed + engine.data_rank, ROWS) for seed in range(8))
        losses = [engine.train_batch(data).item() for _ in range(2)]
        with torch.compiler.set_stance("fail_on_recompile"):
            losses += [engine.train_batch(data).item() for _ in range(2)]
        found.append((losses, weights(engine)))
    (expected, before), (got, after) = found
    gradients = furthest(after, before) / RATE
    return [expected, got, gradients, counters["stats"]["unique_graphs"]]


def half(steps):
    """Losses in bf16 of a split model and of the whole one, which all ranks train alike."""
    curves = []
    for section in (SPLIT, {}):
        engine = start(bf16=True, zero=1, optimizer="AdamW", rate=1e-3, **section)
        data = (batch(engine.module, seed % 8, ROWS) for seed in range(1000))
        curves.append([engine.train_batch(data).item() for _ in range(steps)])
    return curves


def ulysses(_):
    """Sequences on all ranks, some of whose parts have no trained token, beside one process."""
    rank, ranks, whole = dist.get_rank(), dist.get_world_size(), build("llama")

    def text(number):
        ids = torch.randint(3, 101, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
        positions = torch.arange(LENGTH).repeat(ROWS, 1)
        labels = ids.masked_fill(positions >= (5, 9, 12, 7)[number], -100)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}

    expected = []
    for step in range(2):
        loss = sum(whole(**text(ranks * step + each)).loss for each in range(ranks)) / ranks
        expected.append(loss.item())
        loss.backward()
        torch.optim.SGD(whole.parameters(), lr=RATE).step()
        whole.zero_grad()
    mpu = UlyssesSPAttentionHF.register_with_transformers(build("llama"), "sdpa", ranks, ROWS)
    engine = start(zero=3, mpu=mpu)
    own = [text(ranks * step + rank) for step in range(2)]
    data = UlyssesSPDataLoaderAdapter(own, rank, mpu.get_sequence_parallel_group(), ranks, "cpu")
    return {
        "losses": [[engine.train_batch(data).item() for _ in range(2)], expected],
        "gradients": furthest(weights(engine), list(whole.parameters())) / RATE,
        "unshared": refusal(lambda: engine.train_batch(iter([text(0)] * 2))),
        "refused": refusal(lambda: start(zero=1, mpu=mpu)),
    }


class Scaled(nn.Module):
    """A layer with a weight of no dimension."""

    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, inputs):
        return self.scale * self.linear(inputs)


def scalars(stage):
    """Weights of no dimension, from unlike starts on the ranks, beside one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Scaled(2.0 + rank)
    whole = copy.deepcopy(model)
    whole.scale.data.fill_(2.0)
    config = configuration(stage, gradient_accumulation_steps=1, gradient_clipping=0.0)
    config |= {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    config |= {"zero_allow_untested_optimizer": True, "wavemare": {}}
    del config["scheduler"]
    if stage == 3:
        return refusal(lambda: wavemare.initialize(model=model, config=config))
    engine = wavemare.initialize(model=model, config=config)[0]
    for _ in range(2):
        rows = torch.randn(ranks, ROWS, 3)
        (whole(rows).square().mean()).backward()
        torch.optim.SGD(whole.parameters(), lr=RATE).step()
        whole.zero_grad()
        engine.backward(engine(rows[rank]).square().mean())
        engine.step()
    return [
        [weight.tolist() for weight in weights(engine)],
        [weight.tolist() for weight in whole.parameters()],
    ]


def doubles(stage):
    """Weights of float64, and what their refusal says."""
    found = {}
    for name, kind in {"double": torch.float64, "float": torch.float32}.items():
        config = configuration(stage, gradient_accumulation_steps=1, wavemare={})
        model = Scaled([1.0]).to(kind)

        def train(model=model, config=config, kind=kind):
            engine = wavemare.initialize(model=model, config=config)[0]
            engine.backward(engine(torch.ones(ROWS, 3, dtype=kind)).square().mean())
            engine.step()

        found[name] = refusal(train)
    return found


def evaluated(stage):
    """A model without an optimizer."""
    config = configuration(stage, gradient_accumulation_steps=1, wavemare={})
    del config["optimizer"], config["scheduler"]

    def evaluate():
        engine = wavemare.initialize(model=Scaled([1.0]), config=config)[0]
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(ROWS, 3))

    return refusal(evaluate)


if __name__ == "__main__":
    wavemare.init_distributed()
    leave({f"{part} {given}": globals()[part](given) for part, given in json.loads(sys.argv[2])})
