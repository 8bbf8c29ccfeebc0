# SPDX-License-Identifier: Apache-2.0
"""Train pipelines of two stages by 1F1B, and by plans with split backward passes.

Usage: plan_engine.py FOLDER CASE...; each rank leaves the results by case and schedule.
"""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from common import (
    QUIET,
    build_bert,
    build_gpt2,
    configuration,
    kept_between_passes,
    leave,
    own_groups,
    refusal,
    token_batches,
    weights_digest,
)

import wavemare
from wavemare.pipeline.plan.orders import one_f_one_b, zb_h1
from wavemare.pipeline.plan.plan import Plan

MICRO_BATCHES, STEPS = 4, 3
BY_HAND = """
plan schedule=by-hand stages=2 micro_batches=4 steps=1 send_slots=0
0: 0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0W2 0B3
1: 1F0 1I0 1F1 1W0 1B1 1F2 1I2 1F3 1I3 1W2 1W3
"""
MODELS = {
    "gpt2": build_gpt2,
    "gpt2-untied": lambda: build_gpt2(tie_word_embeddings=False),
    "gpt2-quiet": lambda: build_gpt2(**QUIET),
    "gpt2-quiet-untied": lambda: build_gpt2(tie_word_embeddings=False, **QUIET),
    "gpt2-deep": lambda: build_gpt2(tie_word_embeddings=False, n_layer=6, **QUIET),
    "bert": build_bert,
}
BF16 = {"bf16": {"enabled": True}}
# All steps are clipped, and the last bit of the norm changes the weights.
SGD = {
    "gradient_clipping": 0.1,
    "optimizer": {"type": "SGD", "params": {"lr": 2.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 2.0, "warmup_max_lr": 2.0}},
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": True,
    "steps_per_print": 1,
}
CHANGES = {
    "fp32": {"gradient_clipping": 0.0},
    "clipped": {"wall_clock_breakdown": True},
    "reentrant": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
    "bf16-zero-unclipped": {
        "gradient_clipping": 0.0,
        **BF16,
        "zero_optimization": {"stage": 1},
    },
    "checkpoints": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
    "zero": {"zero_optimization": {"stage": 1}},
    "bf16": BF16,
    "bf16-at-once": {"bf16": {"enabled": True, "immediate_grad_update": True}},
    "bf16-zero": {**BF16, "zero_optimization": {"stage": 1}},
    "sgd-checkpoints": {**SGD, "pipeline": {"activation_checkpoint_interval": 1}},
    "sgd-zero": {**SGD, "zero_optimization": {"stage": 1}},
    "sgd-bf16": {**SGD, **BF16},
    "universal": {
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": True},
    },
    "sparse": {},
    "sparse-zero": {"zero_optimization": {"stage": 1}},
}


def start(case, schedule="1f1b", plan=None, **pipeline):
    """Return an engine of a schedule, or of a plan."""
    model, changes = case.split("/")
    sizes = {"gradient_accumulation_steps": MICRO_BATCHES, **CHANGES[changes]}
    ours = {"pipeline": {"stages": 2, "schedule": schedule, **pipeline}}
    if changes.startswith("sparse"):
        ours["sparse_collective"] = {"mode": "auto"}
    config = configuration(0, wavemare=ours, **sizes)
    if plan is not None:
        del ours["pipeline"]["schedule"]
    return wavemare.initialize(model=MODELS[model](), config=config, plan=plan)[0]


def batches(seed):
    for tokens in token_batches(seed):
        yield {"input_ids": tokens, "labels": tokens}


def train(engine):
    torch.manual_seed(engine.stage_id)
    data, kept = batches(engine.data_rank), kept_between_passes(engine)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    evaluation = engine.eval_batch(batches(9), num_micro_batches=2)
    return {
        "kept": kept,
        "losses": losses,
        "evaluation": float(evaluation),
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "weights": weights_digest(engine),
    }


def go_on(engine, data, steps=2):
    losses = [float(engine.train_batch(data)) for _ in range(steps)]
    return {"losses": losses, "weights": weights_digest(engine)}


def resumed(folder):
    """Go on with ZB-H1, and from its checkpoint with either schedule; then with larger steps."""
    engine = start("gpt2-untied/bf16-zero-unclipped", "zb-h1")
    data = batches(0)
    go_on(engine, data)
    engine.save_checkpoint(folder)
    found = {"whole": go_on(engine, data)}
    for schedule in ("zb-h1", "1f1b"):
        engine, data = start("gpt2-untied/bf16-zero-unclipped", schedule), batches(0)
        for _ in range(2 * MICRO_BATCHES):
            next(data)
        assert engine.load_checkpoint(folder)[0]
        found[schedule] = go_on(engine, data)
        engine.set_train_batch_size(3 * engine.train_batch_size())
        found[f"{schedule}, larger"] = go_on(engine, data)
    return found


def short_of_data():
    """Let the data end between two steps, and then within one."""
    twin, engine = start("gpt2-untied/fp32"), start("gpt2-untied/fp32", "zb-h1")
    torch.manual_seed(engine.stage_id)
    found, data = {"as": go_on(twin, batches(0), 3)}, batches(0)
    torch.manual_seed(engine.stage_id)
    go_on(engine, data, 1)
    assert ends(engine, 0)
    found["after"] = go_on(engine, data)
    found["ended"] = refusal(partial(engine.train_batch, islice(batches(0), 1)))
    found["refused"] = refusal(partial(engine.train_batch, data))
    return found


def ends(engine, count):
    """Return whether a step that gets so many micro-batches is left."""
    try:
        engine.train_batch(islice(batches(0), count))
    except StopIteration:
        return True
    return False


def refused():
    yield "fewer micro-batches", refusal(partial(start, "gpt2/fp32", plan=zb_h1(2, 3)))
    yield "unlike plans", refusal(partial(start, "gpt2/fp32", plan=unlike))


def unlike(ranks, micro_batches):
    """Return another plan on each rank."""
    return (zb_h1, one_f_one_b)[torch.distributed.get_rank()](ranks, micro_batches)


if __name__ == "__main__":
    wavemare.init_distributed()
    results, plans = {}, {"1f1b": one_f_one_b, "zb-h1": zb_h1(2, MICRO_BATCHES)}
    if torch.distributed.get_world_size() == 2:
        plans["by hand"] = Plan.parse(BY_HAND)
    for case in sys.argv[2:]:
        with own_groups():
            found = {name: train(start(case, plan=plan)) for name, plan in plans.items()}
        results[case] = found
    if torch.distributed.get_world_size() == 2:
        results |= refused()
        results["resumed"] = resumed(str(Path(sys.argv[1], "checkpoint")))
        results["short of data"] = short_of_data()
    leave(results)
