# SPDX-License-Identifier: Apache-2.0
"""TRL's DPOTrainer in one process: a step over all pairs in each epoch.

Usage: trl_dpo.py MODEL PAIRS.jsonl RESULT.json LORA_R; whole weights are trained if LORA_R is 0.
"""

import json
import sys
from pathlib import Path

import datasets
import transformers
import trl

from wavemare.recipes.llama.dpo import DpoArguments
from wavemare.training.preferences import load_pair_model

STEPS, RATE, BETA, SEED, LENGTH = 4, 1e-3, 0.5, 1234, 64

if __name__ == "__main__":
    folder, file, result, rank = sys.argv[1:]
    rows = datasets.Dataset.from_list(
        [json.loads(line) for line in Path(file).read_text().splitlines()]
    )
    transformers.set_seed(SEED)
    if int(rank):  # adapters of the same random numbers
        _, model = load_pair_model(DpoArguments(model=folder, lora_r=int(rank)))
        others = {}
    else:
        kind = transformers.AutoModelForCausalLM
        model, reference = (kind.from_pretrained(folder, dtype="float32") for _ in range(2))
        others = {"ref_model": reference}
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(
            output_dir=f"{result}-trl",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=len(rows),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=STEPS,
            logging_steps=1,
            beta=BETA,
            max_length=LENGTH,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
        ),
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        **others,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    Path(result).write_text(json.dumps(logs))
