# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer and DPOTrainer, changed by one line, with stages and with split layers.

Usage: trl_trainers.py FOLDER ACTION...; each rank leaves the results by action. One process alone
is TRL's own result.
"""

import wavemare.hf.patch  # noqa: I001  # the line

import json
import os
import sys
from functools import partial
from pathlib import Path

import datasets
import peft
import transformers
import trl
from common import leave, own_groups, refusal
from hf_common import json_file
from safetensors.torch import load_file
from torch import distributed as dist

import wavemare
from wavemare.data.tokenizer import train_tokenizer

WORDS = "the cat sat on a mat and then it ran to some far old house by night".split()
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SFT = {"max_length": 24}
DPO = {"max_length": 24, "beta": 0.5}


def tokenizer():
    return train_tokenizer([" ".join(WORDS)] * 20, 280, kind="gpt")


def text(number, length):
    return " ".join(WORDS[(number * 5 + place * 3) % len(WORDS)] for place in range(length))


def rows(kind):
    """Rows of unlike lengths, of a file: TRL shares what it precomputes by the file's cache."""
    numbers = range(14)
    found = [{"text": text(n, 3 + n % 5)} for n in numbers]
    if kind == "dpo":
        found = [
            {
                "prompt": text(n, 3 + n % 3),
                "chosen": " " + text(n + 1, 2 + n % 4),
                "rejected": " " + text(n + 2, 3 + n % 2),
            }
            for n in numbers
        ]
    if dist.get_rank() == 0:
        Path(f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    dist.barrier()
    files = {"data_files": f"{kind}.jsonl", "split": "train", "cache_dir": "cache"}
    return datasets.load_dataset("json", **files)


def base(**changes):
    transformers.set_seed(7)
    sizes = {
        "vocab_size": len(tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    config = transformers.LlamaConfig(**{**sizes, **changes})
    return transformers.LlamaForCausalLM(config)


def config_of(section):
    if section is None:
        return None
    # Without the wrapper's clipping, whose limit TRL's alone reads.
    return json_file(
        0, section, optimizer={"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    )


def train(name, kind, section, *, lora=True, model=None, reference=None, **changes):
    """Train, evaluate and save; return the figures and the weights that were saved."""
    arguments = {
        "output_dir": name,
        "deepspeed": config_of(section),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        **(SFT if kind == "sft" else DPO),
        **changes,
    }
    make, configure = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
    }[kind]
    whole = kind == "dpo" and not lora and model is None
    others = {"ref_model": base() if reference is None else reference} if whole else {}
    data = rows(kind)
    transformers.set_seed(11)  # adapters
    trainer = make(
        model=base() if model is None else model,
        args=configure(**arguments),
        train_dataset=data.select(range(8)),
        eval_dataset=data.select(range(8, 13)),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA, lora_bias=False) if lora else None,
        **others,
    )
    trainer.train()
    trainer.save_model(f"{name}-saved")
    if dist.is_initialized():
        dist.barrier()
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    weights = load_file(f"{name}-saved/{file}")
    sums = {
        key: [float(w.float().sum()), float(w.float().abs().max())] for key, w in weights.items()
    }
    logs = [
        {k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]
    engine = getattr(trainer, "deepspeed", None)
    if engine is not None:
        engine.destroy()  # DeepSpeed holds the process grid of one engine
    return {"logs": logs, "weights": sums, "engine": type(engine).__name__}


STAGES = {"pipeline": {"stages": 2, "dynamic_shape": True}}
PACKED = {"packing": True, "max_length": 24, "eval_packing": True}
STAGES_OF_PACKED = {
    "pipeline": {**STAGES["pipeline"], "inputs": ["input_ids", "position_ids"]},
}
STALE = {"pipeline": {"stages": 2, "dynamic_shape": True, "schedule": "pipemare"}}
SPLIT = {"tensor_parallel": {"size": 2}}


def refused():
    """What cannot work says so before anything is trained."""
    found = {}
    adapted = partial(peft.get_peft_model, base(), peft.LoraConfig(**LORA))
    for name, kind, section, changes in (
        ("offloading", "sft", STAGES, {"activation_offloading": True}),
        ("stale reference", "dpo", STALE, {}),
        ("waves", "sft", {"wavelet": {"mode": "sync"}}, {}),
        ("waves and dpo", "dpo", {"wavelet": {"mode": "sync"}}, {}),
        ("synchronized", "dpo", STAGES, {"sync_ref_model": True, "lora": False}),
        ("other size", "dpo", SPLIT, {"reference": base(num_hidden_layers=2), "lora": False}),
        ("second adapter", "dpo", STAGES, {"model": adapted(), "lora": False}),
    ):
        found[name] = refusal(partial(train, "refused", kind, section, **changes))
    config = base().config
    config.num_labels = 1
    scored = transformers.LlamaForSequenceClassification(config)
    reward = trl.RewardConfig(
        output_dir="refused", deepspeed=config_of(STAGES), use_cpu=True, bf16=False
    )
    found["reward"] = refusal(
        lambda: trl.RewardTrainer(
            model=scored, args=reward, train_dataset=rows("dpo"), processing_class=tokenizer()
        )
    )
    return found


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    actions = {
        **{f"{kind} alone": partial(train, f"{kind}-alone", kind, None) for kind in ("sft", "dpo")},
        **{
            f"{kind} whole alone": partial(train, f"{kind}-whole-alone", kind, None, lora=False)
            for kind in ("sft", "dpo")
        },
        **{
            f"{kind} stages": partial(train, f"{kind}-stages", kind, STAGES)
            for kind in ("sft", "dpo")
        },
        **{
            f"{kind} whole stages": partial(train, f"{kind}-whole", kind, STAGES, lora=False)
            for kind in ("sft", "dpo")
        },
        **{
            f"{kind} split": partial(train, f"{kind}-split", kind, SPLIT) for kind in ("sft", "dpo")
        },
        "sft packed alone": partial(train, "sft-packed-alone", "sft", None, **PACKED),
        **{
            f"sft packed {layout}": partial(train, f"sft-packed-{layout}", "sft", section, **PACKED)
            for layout, section in (
                ("stages", STAGES_OF_PACKED),
                ("split", SPLIT),
            )
        },
        "sft stale": partial(train, "sft-stale", "sft", STALE, max_steps=8),
        "dpo precomputed": partial(train, "dpo-pre", "dpo", STAGES, precompute_ref_log_probs=True),
        "refused": refused,
        "undeclared": lambda: refusal(partial(train, "refused", "sft", STAGES, **PACKED)),
    }
    results = {}
    wavemare.init_distributed()
    for name in sys.argv[2:]:
        with own_groups():
            results[name] = actions[name]()
    leave(results)
