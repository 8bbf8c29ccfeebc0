# SPDX-License-Identifier: Apache-2.0
"""Train pipelines of two stages by 1F1B, and by plans with split backward passes.

Usage: plan_engine.py FOLDER CASE...; each rank leaves the results by case and schedule.
"""

import sys
from functools import partial
from unittest import mock

import torch
from common import (
    build_bert,
    build_gpt2,
    configuration,
    kept_between_passes,
    leave,
    refusal,
    token_batches,
    weights_digest,
)

import wavemare
from wavemare.engine.initialize import PIPELINE_ENGINES
from wavemare.engine.pipe.linked import PlanEngine
from wavemare.pipeline.plan.chunked import zb_h1
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.schedules import one_f_one_b

MICRO_BATCHES, STEPS = 4, 3
BY_HAND = """
plan schedule=by-hand stages=2 micro_batches=4 steps=1 send_slots=0
0: 0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0W2 0B3
1: 1F0 1I0 1F1 1W0 1B1 1F2 1I2 1F3 1I3 1W2 1W3
"""
PLANS = {"zb-h1": zb_h1(2, MICRO_BATCHES), "by hand": lower(Plan.parse(BY_HAND))}
MODELS = {
    "gpt2": build_gpt2,
    "gpt2-untied": lambda: build_gpt2(tie_word_embeddings=False),
    "bert": build_bert,
}
BF16 = {"bf16": {"enabled": True}}
CHANGES = {
    "fp32": {"gradient_clipping": 0.0},
    "clipped": {},
    "reentrant": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
    "checkpoints": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
    "zero": {"zero_optimization": {"stage": 1}},
    "bf16": BF16,
    "bf16-at-once": {"bf16": {"enabled": True, "immediate_grad_update": True}},
    "bf16-zero": {**BF16, "zero_optimization": {"stage": 1}},
}


def start(case, plan=None):
    """Return an engine of 1F1B, or of a plan."""
    model, changes = case.split("/")
    sizes = {"gradient_accumulation_steps": MICRO_BATCHES, **CHANGES[changes]}
    config = configuration(0, wavemare={"pipeline": {"stages": 2}}, **sizes)
    runs = {} if plan is None else {"1f1b": partial(PlanEngine, plan=plan)}
    with mock.patch.dict(PIPELINE_ENGINES, runs):
        engine = wavemare.initialize(model=MODELS[model](), config=config)[0]
    return engine


def batches(seed):
    for tokens in token_batches(seed):
        yield {"input_ids": tokens, "labels": tokens}


def train(engine):
    torch.manual_seed(engine.stage_id)
    data, kept = batches(0), kept_between_passes(engine)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    evaluation = engine.eval_batch(batches(1), num_micro_batches=2)
    return {
        "engine": type(engine).__name__,
        "kept": kept,
        "losses": losses,
        "evaluation": float(evaluation),
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "weights": weights_digest(engine),
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for case in sys.argv[2:]:
        found = {"1f1b": train(start(case))}
        for name, plan in PLANS.items():
            found[name] = train(start(case, plan))
        results[case] = found
    blocking = one_f_one_b(2, MICRO_BATCHES)
    refused = {"fewer micro-batches": zb_h1(2, 3), "blocking sends": blocking}
    for name, plan in refused.items():
        results[name] = refusal(partial(start, "gpt2/fp32", plan))
    leave(results)
