# SPDX-License-Identifier: Apache-2.0
"""Train with stock DeepSpeed and with wavemare; leave losses and weight digests.

Arguments: result folder, steps, then ZeRO stages, ``pipeline`` or one of `CHANGES`; ``guarded``
before them gives ours a section.
"""

import contextlib
import sys

import deepspeed
import torch
from common import (
    ACCUMULATION,
    build_gpt2,
    build_pipeline,
    configuration,
    leave,
    token_batches,
    weights_digest,
)
from deepspeed.utils import groups

import wavemare

ZERO_STAGES = {"pipeline 1": 1, "defaults": 1, "bf16 1": 1, "bf16 2": 2}
CHANGES = {
    **{name: {"bf16": {"enabled": True}} for name in ("bf16 0", "bf16 1", "bf16 2")},
    "pipeline bf16": {"bf16": {"enabled": True}},
    "bf16 messages": {"communication_data_type": "bf16"},
    "divided": {"gradient_predivide_factor": 3.0},
}


def train(initialize, case, steps):
    groups.mpu = None  # DeepSpeed keeps the grid of a pipeline before
    guarded, case = case.startswith("guarded "), case.removeprefix("guarded ")
    pipeline = case.startswith("pipeline")
    rank = torch.distributed.get_rank()
    data = token_batches(0 if pipeline else rank)
    model = build_pipeline() if pipeline else build_gpt2()
    stage = int(case) if case.isdecimal() else ZERO_STAGES.get(case, 0)
    config = configuration(stage, **CHANGES.get(case, {}))
    if guarded and initialize is wavemare.initialize:
        config["wavemare"] = {}
    if case == "defaults":
        # Stock is told to let torch step as its FusedAdam would; ours does so by itself.
        told = (
            {"torch_adam": True, "weight_decay": 0.0} if initialize is deepspeed.initialize else {}
        )
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, **told}}
    engine, *_ = initialize(model=model, config=config)
    torch.manual_seed(1000 + rank)
    losses = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Reading what it has seen takes longer than the training.
    alone = torch.distributed.get_world_size() == 1
    trace = torch.profiler.profile(activities=activities, record_shapes=True)
    with trace if alone else contextlib.nullcontext():
        for _ in range(steps):
            if pipeline:
                losses.append(engine.train_batch((batch, batch) for batch in data).item())
                continue
            for _ in range(ACCUMULATION):
                batch = next(data)
                loss = engine(input_ids=batch, labels=batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    found = {
        "engine": type(engine).__module__,
        "losses": losses,
        "weights": weights_digest(engine),
    }
    if alone:
        reduced = [event.input_shapes for event in trace.events() if ":all_reduce" in event.name]
        found["all_reduces"] = sum(shapes != [[]] for shapes in reduced)  # not those of numbers
    engine.destroy()  # else DeepSpeed keeps the grid of a pipeline for the next engine
    return found


if __name__ == "__main__":
    wavemare.init_distributed()
    steps, found = int(sys.argv[2]), {}
    for case in sys.argv[3:]:
        of = found.get(case.removeprefix("guarded "))  # stock has trained it without our section
        stock = of["stock"] if of else train(deepspeed.initialize, case, steps)
        found[case] = {"stock": stock, "ours": train(wavemare.initialize, case, steps)}
    leave(found)
