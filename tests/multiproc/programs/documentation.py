# SPDX-License-Identifier: Apache-2.0
"""Programs and configurations of the documentation, with the names that they take for granted.

Gets a JSON file of cases: each has a `text`, its `prelude` and, on failure, the `name` to tell.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from common import leave
from deepspeed.utils import groups

import wavemare
from wavemare.comm import SparseComm
from wavemare.engine import init_distributed
from wavemare.engine.config.resolve import SECTION
from wavemare.engine.optim.optimizers import take_optimizer

LENGTH, VOCABULARY = 16, 64
DS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": None,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
PIPELINE = {**DS, SECTION: {"pipeline": {"stages": 2, "schedule": "pipemare"}}}


def gpt2():
    """As many layers as the documentation's models have, and else as little as can be."""
    transformers.set_seed(7)
    sizes = {"n_layer": 12, "n_embd": 16, "n_head": 2, "n_positions": LENGTH}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **ends)
    )


def batches(size=2):
    generator = torch.Generator().manual_seed(5)
    while True:
        tokens = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


def train_config(text):
    """Train a step by a configuration."""
    config = {"steps_per_print": None, **json.loads(text)}
    engine, *_ = wavemare.initialize(model=gpt2(), config=config)
    loss = float(engine.train_batch(batches(engine.train_micro_batch_size_per_gpu())))
    assert math.isfinite(loss)
    assert 0.5 * math.log(VOCABULARY) < loss < 2 * math.log(VOCABULARY)


def make_optimizer(text):
    """Step a matrix by an optimizer of a configuration."""
    config = json.loads(text)
    if config["optimizer"]["type"] == "Muon":  # ours is for the matrices of pipelines
        init_distributed()
        model: Any = wavemare.to_pipeline(gpt2(), num_stages=2)
    else:
        model = torch.nn.Linear(4, 4)
    rest, make = take_optimizer(config, model, None)
    assert "optimizer" not in rest
    optimizer = make(list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def nothing():
    return {}


def training():
    write("ds.json", PIPELINE)
    for folder in ("model", "FOLDER"):
        if torch.distributed.get_rank() == 0:
            gpt2().save_pretrained(folder)
    torch.distributed.barrier()
    return {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "wavemare": wavemare,
        "folder": "model",
        "steps": 2,
        "batches": batches(),
        "loader": batches(),
    }


def annotated():
    """The models that the page loads, in folders of their names."""
    write(
        "ds.json", {"train_micro_batch_size_per_gpu": 2, "optimizer": DS["optimizer"], SECTION: {}}
    )
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    bert = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    if torch.distributed.get_rank() == 0:
        gpt2().save_pretrained("gpt2")
        transformers.BertForSequenceClassification(bert).save_pretrained("bert-base-uncased")
    torch.distributed.barrier()
    kinds = (transformers.GPT2LMHeadModel, transformers.BertForSequenceClassification)
    return {"wavemare": wavemare, **{kind.__name__: kind for kind in kinds}}


def engine():
    built, *_ = wavemare.initialize(model=gpt2(), config=PIPELINE)
    return {"engine": built, "steps": 2, "batches": batches()}


def observed():
    rank = torch.distributed.get_rank()
    names = {"rank": rank, "stage": rank, "options": {"steps": 15}, "config": PIPELINE}
    return {**engine(), **names, "steps": 15}


def model():
    init_distributed()
    return {"wavemare": wavemare, "model": gpt2(), "torch": torch}


def simulation():
    pipeline = {"stages": 8, "schedule": "pipemare", "pipemare": {"optimizer_policy": "auto"}}
    write("ds.json", {**DS, "gradient_accumulation_steps": 8, SECTION: {"pipeline": pipeline}})
    held_out = [batch for batch, _ in zip(batches(), range(2), strict=False)]
    return {"model": gpt2(), "steps": 1, "batches": batches(), "held_out": held_out}


def sums():
    size = 4096
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {
        "torch": torch,
        "model": torch.nn.Linear(8, 8),
        "flat": torch.zeros(size).index_fill_(0, torch.tensor([rank]), 1.0),
        "ids": torch.tensor([3, 7 + rank]),
        "rows": torch.ones(2, 4),
        "borders": [size * place // ranks for place in range(ranks + 1)],
        "comm": SparseComm(),
    }


def shares():
    config = {key: value for key, value in DS.items() if key != "train_micro_batch_size_per_gpu"}
    return {**model(), "config": {**config, "train_micro_batch_size_per_gpu": 16}}


def cluster():
    devices = [{"type": "T4", "count": 2, "node": "a"}, {"type": "V100", "count": 2, "node": "b"}]
    write("cluster.json", {"devices": devices})
    return {**model(), "model": "gpt2", "config": DS, "rank": torch.distributed.get_rank()}


def megatron():
    write("ds.json", DS)

    def get_batch(iterator):
        tokens = next(iterator)["input_ids"]
        places = torch.arange(LENGTH).expand_as(tokens)
        later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return tokens, tokens, torch.ones(tokens.shape), later, places

    names = {"get_batch": get_batch, "train_iters": 1, "train_data_iterator": batches()}
    return {**model(), **names, "gpt2": gpt2()}


def grid():
    write("ds.json", DS)
    return model()


def texts():
    lines = [f"stage {n % 5} holds batch {n % 7} and sends it on\n" for n in range(200)]
    Path("train.txt").write_text("".join(lines))
    Path("data").mkdir(exist_ok=True)
    return {}


def write(name, values):
    if torch.distributed.get_rank() == 0:
        Path(name).write_text(json.dumps(values))
    torch.distributed.barrier()


PRELUDES = (nothing, training, annotated, engine, observed, model, simulation, sums, shares)
PRELUDES += (cluster, megatron, grid, texts)
CHECKS = (train_config, make_optimizer)


def run(case, names):
    """Run one case; return what it has defined, which the next one of its page may use."""
    groups.mpu = None  # where DeepSpeed keeps that of the engine before
    checks = {check.__name__: check for check in CHECKS}
    if case["prelude"] in checks:
        checks[case["prelude"]](case["text"])
        return {}
    prelude = {made.__name__: made for made in PRELUDES}[case["prelude"]]
    names = {**names, **prelude(), "__name__": "documentation"}
    exec(compile(case["text"], case["name"], "exec"), names)
    if isinstance(names.get("comm"), SparseComm):
        names["comm"].close()
    return names


if __name__ == "__main__":
    init_distributed()
    cases = json.loads(Path(sys.argv[2]).read_text())
    os.chdir(sys.argv[1])
    left: dict[str, dict[str, Any]] = {}
    for case in cases:
        print(f"running {case['name']}", flush=True)
        left[case["page"]] = run(case, left.get(case["page"], {}))
    leave([case["name"] for case in cases])
