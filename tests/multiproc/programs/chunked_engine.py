# SPDX-License-Identifier: Apache-2.0
"""Train with several stages on each of two ranks, beside 1F1B.

Usage: chunked_engine.py FOLDER CASE...; each rank leaves the results by case and schedule.
"""

import sys
from pathlib import Path

import torch
from common import configuration, leave, refusal
from plan_engine import MODELS, batches, go_on, start

import wavemare
from wavemare.models.export import pipeline_state_dict

SCHEDULES = ["interleaved", "zbv", "auto"]


def weights(engine):
    """Return the sum of the bits of each weight of the model, on rank 0."""
    state = pipeline_state_dict(engine) or {}
    return {
        name: int(tensor.contiguous().view(torch.uint8).long().cumsum(-1).sum())
        for name, tensor in state.items()
    }


def train(engine):
    torch.manual_seed(0)
    data = batches(0)
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    evaluation, logits = engine.eval_batch(batches(9), return_logits=True, num_micro_batches=3)
    return {
        "losses": losses,
        "evaluation": float(evaluation),
        "logits": 0.0 if logits is None else float(logits.double().sum()),
        "more": float(engine.train_batch(data)),
        "weights": weights(engine),
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "homes": list(engine.module.homes),
    }


def resumed(folder):
    case = "gpt2-quiet-untied/bf16-zero"
    engine, data = start(case, "zbv"), batches(0)
    go_on(engine, data)
    engine.save_checkpoint(folder)
    found = {"saved": weights(engine), "whole": go_on(engine, data)}
    engine, data = start(case, "zbv"), batches(0)
    go_on(engine, data)
    engine.load_checkpoint(folder)
    found["resumed"] = go_on(engine, data)
    other = start(case)
    found["other"] = refusal(lambda: other.load_checkpoint(folder))
    other.load_checkpoint(folder, load_module_only=True)
    found["loaded"] = weights(other)
    return found


def refused():
    """Return what is said of a model that is cut for a V, with 1F1B."""
    model = wavemare.to_pipeline(MODELS["gpt2-quiet-untied"](), num_stages=2, homes=(0, 1, 1, 0))
    config = configuration(0, wavemare={"pipeline": {"stages": 2}}, gradient_accumulation_steps=4)
    return refusal(lambda: wavemare.initialize(model=model, config=config))


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for case in sys.argv[2:]:
        found = {"1f1b": train(start(case))}
        for schedule in SCHEDULES:
            found[schedule] = train(start(case, schedule))
        results[case] = found
    results["resumed"] = resumed(str(Path(sys.argv[1], "checkpoint")))
    results["refused"] = refused()
    leave(results)
