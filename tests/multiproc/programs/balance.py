# SPDX-License-Identifier: Apache-2.0
"""Unequal work on 2 data ranks, and on 2 replicas of a pipeline: beside one process that has all.

Each case trains some steps with plain SGD, and leaves the largest difference of a weight from those
of a loop without DeepSpeed, and of the losses.
"""

import json
import math
import sys

import deepspeed
import torch
import torch.distributed as dist
from common import QUIET, build_bert, build_gpt2, leave
from torch import Tensor

import wavemare

STEPS, LENGTH, VOCABULARY, WIDTH = 3, 8, 50, 24


def main():
    wavemare.init_distributed()
    leave({name: run(case) for name, case in json.loads(sys.argv[2]).items()})


def run(case):
    samples, build = MODELS[case["model"]]
    try:
        return compare(case, samples, build)
    except wavemare.errors.ConfigError as error:
        return {"refused": str(error)}


def compare(case, samples, build):
    sections = case.get("wavemare", {})
    ranks = [sections.get("pipeline", {}).get("stages", 1)]
    ranks.append(sections.get("tensor_parallel", {}).get("size", 1))
    replicas = dist.get_world_size() // math.prod(ranks)
    micro, steps = case.get("micro", 4), case.get("accumulation", 1)
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_optimization": {"stage": case.get("zero", 0)},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": case.get("clipping", 0.0),
        "steps_per_print": None,
        "bf16": {"enabled": case.get("bf16", False)},
        "wavemare": sections,
    }
    total = micro * steps * replicas
    whole = [samples(seed, total) for seed in range(STEPS)]
    loader = case.get("loader", False)
    dataset = Rows(whole) if loader else None
    engine, *_ = wavemare.initialize(model=build(), config=config, training_data=dataset)
    own = None if loader else parts(whole, case, engine.data_rank, replicas, micro, steps)
    losses = []
    for _ in range(STEPS):
        if case.get("loop"):
            loop(engine, own, case)
        else:
            losses.append(float(engine.train_batch(own)))
    expected_losses, expected = reference(build(), whole, case, replicas, micro, steps)
    mine = weights_of(engine)
    # Of split layers the whole weights tell: norms and biases get gradients through all others.
    whole_ones = {n: w for n, w in expected.items() if n in mine and mine[n].shape == w.shape}
    gaps = [(mine[n] - w).abs().max().item() for n, w in whole_ones.items()]
    assert gaps
    assert engine.global_steps == STEPS
    assert engine.pipeline_parallelism or engine.micro_steps == STEPS * steps
    engine.destroy()
    # In a caller's own loop their mean is not the engine's to know.
    pairs = zip(losses, expected_losses, strict=not case.get("loop"))
    loss_gap = max((abs(a - b) for a, b in pairs), default=0.0)
    return {"weights": max(gaps), "losses": loss_gap, "compared": len(gaps)}


def loop(engine, own, case):
    """A step of a caller's own loop."""
    batch = next(own)
    loss = engine(**batch)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    if case["loop"] == "scale":
        engine.scale(loss).backward()
    elif case["loop"] == "direct":
        loss.backward()
    else:
        engine.backward(loss)
    engine.step()


def parts(whole, case, rank, replicas, micro, steps):
    """Yield this rank's micro-batches: contiguous parts of all samples."""
    shares = case.get("shares") or [micro] * replicas
    for batch in whole:
        for begin in range(sum(shares[:rank]), len(shares) * micro * steps, sum(shares)):
            end = begin + shares[rank]
            yield {name: value[begin:end] for name, value in batch.items()}


def reference(model, whole, case, replicas, micro, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    chunk = micro * replicas
    for batch in whole:
        optimizer.zero_grad()
        total = 0.0
        for i in range(steps):
            part = {name: value[i * chunk : (i + 1) * chunk] for name, value in batch.items()}
            output = model(**part)
            loss = (output if isinstance(output, Tensor) else output.loss) / steps
            loss.backward()
            total += float(loss)
        if case.get("clipping"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clipping"])
        optimizer.step()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def weights_of(engine):
    module = engine.module
    if isinstance(module, deepspeed.PipelineModule):
        return {name: value.float() for name, value in module.local_weights().items()}
    parameters = list(module.parameters())
    with deepspeed.zero.GatheredParameters(
        parameters, enabled=engine.zero_optimization_stage() == 3
    ):
        return {name: value.detach().float().clone() for name, value in module.named_parameters()}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """All samples of all steps, which torch's own sampler puts into their order."""

    def __init__(self, whole):
        self.all = {name: torch.cat([b[name] for b in whole]) for name in whole[0]}
        order = torch.utils.data.DistributedSampler(range(len(self)), num_replicas=1, rank=0)
        self.place = {index: place for place, index in enumerate(order)}

    def __len__(self):
        return len(next(iter(self.all.values())))

    def __getitem__(self, index):
        return {name: value[self.place[index]] for name, value in self.all.items()}


class Net(torch.nn.Module):
    """Two layers and a mean squared error."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.b = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, y):
        output = self.b(torch.nn.functional.gelu(self.a(x)))
        return torch.nn.functional.mse_loss(output, y)


def net_samples(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, WIDTH, generator=generator) for name in "xy"}


def gpt_samples(seed, count):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def masked_samples(seed, count):
    """Very unequal numbers of labels; the last quarter of the samples has none at all."""
    batch = gpt_samples(seed, count)
    generator = torch.Generator().manual_seed(1000 + seed)
    share = torch.linspace(1.0, -0.2, count)[:, None]
    kept = torch.rand(count, LENGTH, generator=generator) < share
    kept[-count // 4 :] = False
    return {**batch, "labels": torch.where(kept, batch["labels"], -100)}


def bert():
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return build_bert(**drops, max_position_embeddings=LENGTH)


def gpt():
    return build_gpt2(**QUIET)


MODELS = {
    "net": (net_samples, Net),
    "gpt": (gpt_samples, gpt),
    "masked gpt": (masked_samples, gpt),
    "untied gpt": (masked_samples, lambda: build_gpt2(**QUIET, tie_word_embeddings=False)),
    "masked bert": (masked_samples, bert),
}

main()
