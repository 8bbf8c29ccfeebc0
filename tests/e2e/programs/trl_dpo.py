# SPDX-License-Identifier: Apache-2.0
"""TRL's DPOTrainer in one process: a step over all pairs in each epoch.

Usage: trl_dpo.py MODEL PAIRS.jsonl RESULT.json LORA_R; whole weights are trained if LORA_R is 0.
"""

import json
import sys
from pathlib import Path

import datasets
import peft
import transformers
import trl

STEPS, RATE, BETA, SEED, LENGTH = 4, 1e-3, 0.5, 1234, 64

if __name__ == "__main__":
    folder, file, result, rank = sys.argv[1:]
    rows = datasets.Dataset.from_list(
        [json.loads(line) for line in Path(file).read_text().splitlines()]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    transformers.set_seed(SEED)  # adapters
    lora = peft.LoraConfig(
        r=int(rank) or 1, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=None if int(rank) else type(model).from_pretrained(folder, dtype="float32"),
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
        peft_config=lora if int(rank) else None,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    Path(result).write_text(json.dumps(logs))
