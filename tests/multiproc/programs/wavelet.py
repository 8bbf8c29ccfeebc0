"""Train with stock DeepSpeed and as waves; leave losses and weight digests.

Arguments: result folder, then a JSON list of cases.
"""

import json
import sys

import deepspeed
import torch
import transformers
from common import build_gpt2, configuration, leave, token_batches, weights_digest

import wavemare

MICRO_BATCHES = 3


def build_bert():
    transformers.set_seed(7)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


def build(case):
    model = build_bert() if case["model"] == "bert" else build_gpt2(use_cache=False)
    if case.get("untied"):
        model.get_output_embeddings().weight = torch.nn.Parameter(
            model.get_input_embeddings().weight.detach().clone()
        )
        model.config.tie_word_embeddings = False
    if case.get("checkpointing"):
        model.activation_checkpointing_enable()
    return model


def batches(rank):
    for tokens in token_batches(rank):
        yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def train(initialize, case):
    config = configuration(case["zero"], **case.get("config", {}))
    config["gradient_accumulation_steps"] = MICRO_BATCHES
    config["zero_optimization"].update(case.get("zero_keys", {}))
    if initialize is wavemare.initialize:
        config["wavemare"] = {"wavelet": {"mode": "sync", **case.get("wavelet", {})}}
        config["wavemare"].update(case.get("wavemare", {}))
    engine, *_ = initialize(model=build(case), config=config)
    rank = torch.distributed.get_rank()
    torch.manual_seed(1000 + rank)
    data = batches(rank)
    losses = []
    for _ in range(case.get("steps", 4)):
        if initialize is wavemare.initialize:
            losses.append(engine.train_batch(data).item())
            continue
        engine.train()
        micro = []
        for _ in range(MICRO_BATCHES):
            loss = engine(**next(data)).loss
            engine.backward(loss)
            engine.step()
            micro.append(loss.detach())
        mean = torch.stack(micro).float().mean()
        torch.distributed.all_reduce(mean)
        losses.append((mean / torch.distributed.get_world_size()).item())
    result = {"losses": losses, "weights": weights_digest(engine)}
    result["steps"] = engine.global_steps
    engine.destroy()
    return result


if __name__ == "__main__":
    wavemare.init_distributed()
    leave(
        {
            name: {
                "stock": train(deepspeed.initialize, case),
                "ours": train(wavemare.initialize, case),
            }
            for name, case in json.loads(sys.argv[2]).items()
        }
    )
