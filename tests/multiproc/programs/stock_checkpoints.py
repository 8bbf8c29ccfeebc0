# SPDX-License-Identifier: Apache-2.0
"""Save or resume with wavemare or stock DeepSpeed; leave the losses and weights of each cell.

Arguments: result folder, checkpoint folder, ``ours`` or ``stock``, ``save`` or ``load``, then
cells: kind (a ZeRO stage, ``pipe0``, ``pipe1``, ``elastic``, ``moe``), precision and optimizer, as
in ``1-bf16-adamw``; for a load ``SAVED:LOADED``. ``fused`` is DeepSpeed's FusedAdam, whose compiled
kernel is replaced by its formula in Python.
"""

import os
import sys
from pathlib import Path

import deepspeed
import torch
from checkpoints import STEPS, Experts, train
from common import QUIET, build_gpt2, configuration, leave, token_batches, weights_digest

import wavemare

OPTIMIZERS = {
    "adamw": {"type": "AdamW", "params": {"torch_adam": True}},
    "adam": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}},
    "fused": {"type": "AdamW", "params": {}},
    "default": {"type": "AdamW", "params": {}},
    "sgd": {"type": "SGD", "params": {}},
}


class Kernel:
    """The formula of FusedAdam's compiled kernel."""

    @staticmethod
    def multi_tensor_adam(_size, _buffer, lists, rate, b1, b2, eps, step, decouple, correct, decay):
        for gradient, weight, average, square in zip(*lists, strict=True):
            slope = gradient if decouple else gradient + decay * weight
            average.mul_(b1).add_(slope, alpha=1 - b1)
            square.mul_(b2).addcmul_(slope, slope, value=1 - b2)
            first, second = (1 - b1**step, 1 - b2**step) if correct else (1, 1)
            update = average / first / ((square / second).sqrt() + eps)
            weight.sub_(rate * (update + decay * weight if decouple else update))


def build(initialize, cell):
    kind, precision, optimizer = cell.split("-")
    # Only now: the process group has been made, for which DeepSpeed would compile as well.
    os.environ["WAVEMARE_COMPILED_OPS"] = str(int(optimizer == "fused"))
    stage = {"pipe0": 0, "pipe1": 1, "elastic": 1, "moe": 0}.get(kind, kind)
    settings = OPTIMIZERS[optimizer]
    zero = {"stage": int(stage), "elastic_checkpoint": kind == "elastic"}
    config = configuration(
        int(stage),
        optimizer={**settings, "params": {"lr": 1e-2, "weight_decay": 0.1, **settings["params"]}},
        zero_optimization=zero,
        bf16={"enabled": precision == "bf16"},
    )
    model = Experts() if kind == "moe" else build_gpt2(**QUIET)
    if kind.startswith("pipe"):
        model = wavemare.to_pipeline(model, num_stages=2, inputs=["input_ids"])
    return initialize(model=model, config=config)[0]


def steps(engine, cell, first):
    pipeline = cell.startswith("pipe")
    data = token_batches(0 if pipeline else torch.distributed.get_rank())
    for _ in range(first * 2):
        next(data)
    batches = ((batch, batch) for batch in data)
    losses = train(engine, "pipeline" if pipeline else "data", batches)
    return {"losses": losses, "weights": weights_digest(engine)}


def save(initialize, folder, cell):
    engine = build(initialize, cell)
    steps(engine, cell, 0)
    engine.save_checkpoint(str(folder / cell), "first")
    result = steps(engine, cell, STEPS)
    engine.destroy()
    return result


def load(initialize, folder, cells):
    saved, cell = cells.split(":")
    engine = build(initialize, cell)
    before = weights_digest(engine)
    try:
        path, _ = engine.load_checkpoint(str(folder / saved))
        assert path is not None
        result = steps(engine, cell, STEPS)
    except Exception as error:
        untouched = weights_digest(engine) == before
        result = {"error": f"{type(error).__name__}: {error}", "untouched": untouched}
    engine.destroy()
    return result


if __name__ == "__main__":
    wavemare.init_distributed()
    deepspeed.ops.op_builder.FusedAdamBuilder.load = lambda self, verbose=True: Kernel
    initialize = {"ours": wavemare.initialize, "stock": deepspeed.initialize}[sys.argv[3]]
    action = {"save": save, "load": load}[sys.argv[4]]
    leave({cell: action(initialize, Path(sys.argv[2]), cell) for cell in sys.argv[5:]})
