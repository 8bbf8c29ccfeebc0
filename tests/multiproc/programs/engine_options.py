# SPDX-License-Identifier: Apache-2.0
"""Engines with an option of torch or DeepSpeed, beside the same model without it.

Arguments: result folder, then a JSON list of [part, argument].
"""

import json
import sys

import deepspeed
import torch
from common import furthest, leave, refusal
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from deepspeed.utils import groups
from tensor_models import batch, build
from torch import distributed as dist
from torch._dynamo.utils import counters

import wavemare

ROWS, ACCUMULATION, RATE = 3, 2, 0.1
SPLIT = {"tensor_parallel": {"size": 2}}
KINDS = {"zero": {"zero": 1}, "stages": {"pipeline": {"stages": 2}}, "split": {**SPLIT, "zero": 1}}


def start(model, *, zero=0, optimizer=None, bf16=False, mpu=None, **section):
    groups.mpu = None
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": optimizer or {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "steps_per_print": None,
        "wavemare": section,
    }
    return wavemare.initialize(model=model, config=config, mpu=mpu)[0]


def batches(engine, model, first=0):
    for seed in range(first, first + 1000):
        yield batch(model, 2 * seed + engine.data_rank, ROWS)


def weights(engine):
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().clone() for p in parameters]


def compiled(kind):
    """Two steps that may compile, and two that must not, beside steps that are not compiled."""
    found = []
    for compiles in (False, True):
        model = build("llama")
        engine = start(model, **KINDS[kind])
        if compiles:
            counters.clear()
            blocks = [m for m in engine.module.modules() if "DecoderLayer" in type(m).__name__]
            for block in blocks if kind != "stages" else [engine.module]:  # which compiles layers
                block.compile(backend="aot_eager")
        data = batches(engine, build("llama"))
        losses = [engine.train_batch(data).item() for _ in range(2)]
        with torch.compiler.set_stance("fail_on_recompile"):
            losses += [engine.train_batch(data).item() for _ in range(2)]
        found.append((losses, weights(engine)))
    (expected, before), (got, after) = found
    return {
        "losses": max(abs(a - b) for a, b in zip(got, expected, strict=True)),
        "gradients": furthest(after, before) / RATE,
        "moved": abs(got[-1] - got[0]),
        "graphs": counters["stats"]["unique_graphs"],
        "blocks": len(blocks),
    }


def half(steps):
    """Losses in bf16 of a split model and of the whole one, which all ranks train alike."""
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    curves = []
    for section in (SPLIT, {}):
        engine = start(build("llama"), bf16=True, zero=1, optimizer=adam, **section)
        data = (batch(engine.module, seed % 8, ROWS) for seed in range(1000))
        curves.append([engine.train_batch(data).item() for _ in range(steps)])
    return curves


def ulysses(_):
    """Sequences on all ranks, some of whose parts have no trained token, beside one process."""
    ranks = dist.get_world_size()

    def text(number):
        ids = torch.randint(3, 101, (ROWS, 12), generator=torch.Generator().manual_seed(number))
        labels = ids.masked_fill(torch.arange(12) >= (5, 9, 12, 7)[number % 4], -100)
        return {
            "input_ids": ids,
            "position_ids": torch.arange(12).repeat(ROWS, 1),
            "labels": labels,
        }

    whole = build("llama")
    expected = []
    for step in range(2):
        losses = [whole(**text(ranks * step + rank)).loss for rank in range(ranks)]
        expected.append(sum(losses).item() / ranks)
        (sum(losses) / ranks).backward()
        with torch.no_grad():
            for p in whole.parameters():
                p.sub_(RATE * p.grad)
        whole.zero_grad()
    evaluated = sum(whole(**text(rank)).loss.item() for rank in range(ranks)) / ranks

    def engine_of(**changes):
        return start(build("llama"), mpu=mpu, **changes)

    mpu = UlyssesSPAttentionHF.register_with_transformers(build("llama"), "sdpa", ranks, ROWS)
    engine = engine_of(zero=3)

    def shared():
        own = [text(ranks * step + dist.get_rank()) for step in range(2)]
        group = mpu.get_sequence_parallel_group()
        return UlyssesSPDataLoaderAdapter(own, dist.get_rank(), group, ranks, engine.device)

    data = shared()
    losses = [engine.train_batch(data).item() for _ in range(2)]
    trained = [p.detach() for p in whole.parameters()]
    start_of = list(build("llama").parameters())
    return {
        "losses": [losses, expected],
        "evaluated": [engine.eval_batch(shared()).item(), evaluated],
        "gradients": furthest(weights(engine), trained) / RATE,
        "moved": furthest(trained, start_of) / RATE,
        "data_ranks": [engine.data_rank, engine.data_world_size],
        "unshared": refusal(lambda: engine.train_batch(iter([text(0)] * 2))),
        "refused": refusal(lambda: engine_of(zero=1)),
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    leave({f"{part} {given}": globals()[part](given) for part, given in json.loads(sys.argv[2])})
