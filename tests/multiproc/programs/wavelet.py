# SPDX-License-Identifier: Apache-2.0
"""Train with stock DeepSpeed and as waves; leave losses and weight digests.

Arguments: result folder, then a JSON list of cases.
"""

import json
import sys

import deepspeed
import peft
import tensor_models
import torch
from common import (
    build_bert,
    build_gpt2,
    build_moe,
    configuration,
    leave,
    token_batches,
    warnings_told,
    weights_digest,
)

import wavemare

MICRO_BATCHES = 3


def build(case):
    if case["model"] == "bert":
        model = build_bert()
    elif case["model"] == "gpt":
        model = build_gpt2(use_cache=False, **case.get("model_keys", {}))
    elif case["model"] == "moe":
        model = build_moe(case.get("kind", "qwen3_moe"), auxiliary=True, attention_dropout=0.1)
    else:
        model = tensor_models.build(case["model"], residual=0.1, attention=0.1).train()
    if case.get("untied"):
        model.get_output_embeddings().weight = torch.nn.Parameter(
            model.get_input_embeddings().weight.detach().clone()
        )
        model.config.tie_word_embeddings = False
    if case.get("lora"):
        torch.manual_seed(3)
        targets = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, targets)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable()
    return model


def batches(rank):
    for tokens in token_batches(rank):
        yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def train(initialize, case, **wavelet):
    """Train with stock DeepSpeed, or with settings of waves."""
    config = configuration(case["zero"], **case.get("config", {}))
    config["gradient_accumulation_steps"] = case.get("micro_batches", MICRO_BATCHES)
    config["zero_optimization"].update(case.get("zero_keys", {}))
    ours = initialize is wavemare.initialize
    if ours:
        config["wavemare"] = {**case.get("wavemare", {}), "wavelet": wavelet}
    engine, *_ = initialize(model=build(case), config=config)
    if ours and case.get("compiles"):
        engine.compile()
    rank = engine.data_rank if ours else torch.distributed.get_rank()
    torch.manual_seed(1000 + rank)
    data = batches(rank)
    losses = []
    for _ in range(case.get("steps", 4)):
        losses.append(engine.train_batch(data).item() if ours else stock_step(engine, data))
    result = {
        "losses": losses,
        "weights": weights_digest(engine),
        "steps": [engine.global_steps, engine.global_samples, engine.tput_timer.global_step_count],
        "zero": engine.zero_optimization_stage(),
    }
    waves = getattr(engine, "_wavelet", None)
    paired = waves is not None and waves.paired
    engine.destroy()
    return result, paired


def stock_step(engine, data):
    engine.train()
    losses = []
    count = engine.gradient_accumulation_steps()
    for left in reversed(range(count)):
        loss = engine(**next(data)).loss
        engine.backward(loss)
        if engine.managed_gradient_accumulation() or not left:  # else each step() is a whole one
            engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).float().mean()
    torch.distributed.all_reduce(mean)
    return (mean / torch.distributed.get_world_size()).item()


def compare(case):
    """Return what the case's waves give, and what stock DeepSpeed, or ours without waves."""
    split = case.get("wavemare", {}).keys() & {"tensor_parallel", "expert_parallel"}
    if split:
        expected, _ = train(wavemare.initialize, case, mode="off")
    else:
        expected, _ = train(deepspeed.initialize, case)
    with warnings_told("wavelet") as told:
        got, paired = train(
            wavemare.initialize, case, **{"mode": "sync", **case.get("wavelet", {})}
        )
    return {"expected": expected, "got": got, "paired": paired, "told": told}


if __name__ == "__main__":
    wavemare.init_distributed()
    leave({name: compare(case) for name, case in json.loads(sys.argv[2]).items()})
