# SPDX-License-Identifier: Apache-2.0
"""Train with each optimizer under ZeRO 0 and 1, in fp32 and bf16; leave weights and losses.

Arguments: result folder, a JSON list of cases: ``engine`` (data, 1f1b or pipemare), ``type``,
``zero``, ``bf16``, ``stages``, ``pipemare`` (its section), ``alike`` (whether data ranks have the
same data), what else `build` reads, and ``save`` or ``resume`` after so many steps, with a
``folder``.
"""

import json
import sys
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from common import leave, warnings_told, weights_digest

import wavemare
from wavemare.errors import WavemareError
from wavemare.pipeline.optim.matrix_optimizer import FEEDBACK, MatrixOptimizer

WIDTH, WORDS, MICRO, LENGTH, ACCUMULATION, STEPS = 12, 23, 4, 8, 2, 8
PARAMS = {
    "SOAP": {"lr": 0.02, "weight_decay": 0.1, "refresh": 3, "max_size": 16},
    "NAdam": {"lr": 0.02, "betas": [0.99, 0.999], "momentum_decay": 1000, "weight_decay": 0.1},
    "Muon": {"lr": 0.05, "adam_lr": 0.01, "weight_decay": 0.1},
    "AdamW": {"lr": 0.02, "weight_decay": 0.1},
}
PARAMS["NAdam"]["decoupled_weight_decay"] = True


def layers():
    torch.manual_seed(7)
    body = []
    for inner in (20, 14):  # 20 is longer than max_size: rotated on one side
        body += [torch.nn.Linear(WIDTH, inner), torch.nn.Tanh(), torch.nn.Linear(inner, WIDTH)]
        body += [torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)]
    return [torch.nn.Embedding(WORDS, WIDTH), *body, torch.nn.Linear(WIDTH, WORDS)]


def loss_fn(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers())

    def forward(self, tokens, labels):
        return loss_fn(self.layers(tokens), labels)


def build(case):
    kind, stages = case["type"], case.get("stages", 1)
    asynchronous = case["engine"] == "pipemare"
    section = {"stages": stages}
    if asynchronous:
        section |= {"schedule": "pipemare", "pipemare": case.get("pipemare", {})}
    params = {**PARAMS[kind], **case.get("params", {})}
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": case.get("accumulation", ACCUMULATION),
        "optimizer": {"type": case.get("name", kind), "params": params},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 5},
        },
        "zero_optimization": {"stage": case["zero"], **case.get("zero_options", {})},
        "gradient_clipping": case.get("clip", 0.0),
        "steps_per_print": None,
        "wavemare": {"pipeline": section if stages > 1 else {}},
    }
    if kind == "Muon":
        del config["scheduler"]  # it knows one rate
    if case.get("bf16"):
        config["bf16"] = {"enabled": True}
    if case.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    if case["engine"] == "data":
        model = Whole()
    else:
        parts = layers()
        if case.get("grouped"):  # a part is all that a stage has
            half = len(parts) // 2
            parts = [torch.nn.Sequential(*parts[:half]), torch.nn.Sequential(*parts[half:])]
        model = deepspeed.PipelineModule(
            parts, num_stages=stages, loss_fn=loss_fn, partition_method="uniform"
        )
    engine, *_ = wavemare.initialize(model=model, config=config)
    return engine


def batches(engine, case):
    seed = 100 + (0 if case.get("alike") else engine.data_rank)
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, WORDS, (MICRO, LENGTH), generator=generator)
        yield tokens, (3 * tokens + 1) % WORDS


@contextmanager
def noting_partitions():
    """Give what optimizers of matrices are told of the flat weights that ZeRO makes."""
    found, real = {}, MatrixOptimizer.set_partition

    def set_partition(self, parameter, partition):
        found[parameter] = partition
        real(self, parameter, partition)

    with mock.patch.object(MatrixOptimizer, "set_partition", set_partition):
        yield found


def train(case):
    with noting_partitions() as partitions:
        engine = build(case)
    data = batches(engine, case)
    losses = []
    folder = Path(sys.argv[1], case.get("folder", "."))
    steps = case.get("steps", STEPS)
    if "resume" in case:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        next(islice(data, case["resume"] * ACCUMULATION - 1, None))
    for step in range(case.get("resume", 0), steps):
        if step == case.get("save"):
            engine.save_checkpoint(str(folder))
        losses.append(float(engine.train_batch(data)))
    if hasattr(engine, "drain"):
        engine.drain()
    basic = engine.basic_optimizer
    groups = basic.param_groups
    cut = sum(
        partitions[parameter].cut_elements(partial(basic.is_matrix, group))
        for group in groups
        for parameter in group["params"]
        if parameter in partitions
    )
    own = engine.settings.pipeline.pipemare
    result = {
        "remedies": [own.error_feedback, own.discrepancy_correction.mode],
        "previous updates": sum(FEEDBACK in state for state in basic.state.values()),
        "losses": losses,
        "digest": weights_digest(engine),
        "kind": f"{type(basic).__module__}.{type(basic).__name__}",
        "wrapper": type(engine.optimizer).__name__,
        "refresh": [group.get("refresh") for group in groups],
        "rates": [group["lr"] for group in groups],
        "muon": [group.get("use_muon") for group in groups],
        "shapes": [[list(p.shape) for p in group["params"]] for group in groups],
        "cut": cut,
        "stage": getattr(engine, "stage_id", 0),
    }
    engine.destroy()
    return result


def attempt(case):
    try:
        with warnings_told("pipemare: ") as told, redirect_stderr(StringIO()) as printed:
            result = train(case)
        chosen = [line for line in printed.getvalue().splitlines() if "_policy auto: " in line]
        return {**result, "told": told, "chosen": chosen}
    except WavemareError as error:
        return {"error": type(error).__name__, "key": error.key, "message": str(error)}


if __name__ == "__main__":
    wavemare.init_distributed()
    leave([attempt(case) for case in json.loads(sys.argv[2])])
