# SPDX-License-Identifier: Apache-2.0
"""Train with stock DeepSpeed and with wavemare; leave losses and weight digests.

Arguments: result folder, steps, then ZeRO stages, ``pipeline`` or one of `CHANGES`.
"""

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

import wavemare

ZERO_STAGES = {"pipeline": 0, "defaults": 1, "bf16 messages": 0, "divided": 0}
CHANGES = {
    "bf16 messages": {"communication_data_type": "bf16"},
    "divided": {"gradient_predivide_factor": 3.0},
}


def train(initialize, case, steps):
    pipeline = case == "pipeline"
    rank = torch.distributed.get_rank()
    data = token_batches(0 if pipeline else rank)
    model = build_pipeline() if pipeline else build_gpt2()
    stage = ZERO_STAGES[case] if case in ZERO_STAGES else int(case)
    config = configuration(stage, **CHANGES.get(case, {}))
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
    with torch.profiler.profile(activities=activities, record_shapes=True) as trace:
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
    reduced = [event.input_shapes for event in trace.events() if ":all_reduce" in event.name]
    return {
        "engine": type(engine).__module__,
        "losses": losses,
        "weights": weights_digest(engine),
        "all_reduces": sum(shapes != [[]] for shapes in reduced),  # without those of numbers
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    leave(
        {
            case: {
                "stock": train(deepspeed.initialize, case, int(sys.argv[2])),
                "ours": train(wavemare.initialize, case, int(sys.argv[2])),
            }
            for case in sys.argv[3:]
        }
    )
