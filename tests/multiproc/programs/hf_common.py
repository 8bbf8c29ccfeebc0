# SPDX-License-Identifier: Apache-2.0
"""What the Trainer's programs share: tiny BERT and GPT-2, data sets, arguments, digests."""

import hashlib
import sys

import torch
from common import DEVICE, LENGTH, VOCABULARY, build_bert, build_gpt2
from transformers import BertForSequenceClassification, TrainingArguments

MODELS = {
    "gpt2": build_gpt2,
    "bert": lambda: build_bert(BertForSequenceClassification, num_labels=3),
}


def plain_model(kind):
    """Without dropout, so that nothing is drawn."""
    model = MODELS[kind]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


class Rows(torch.utils.data.Dataset):
    """Random token rows; what BERT is to classify is the first token."""

    def __init__(self, kind, count, *, seed=0, varied=False):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for number in range(count):
            length = 4 + number * 7 % (LENGTH - 3) if varied else LENGTH
            ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
            labels = ids.clone() if kind == "gpt2" else ids[0] % 3
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def pad(features):
    """A collator of rows of unlike lengths."""
    longest = max(len(feature["input_ids"]) for feature in features)

    def padded(values, filler):
        return torch.nn.functional.pad(values, (0, longest - len(values)), value=filler)

    labels = [f["labels"] for f in features]
    return {
        "input_ids": torch.stack([padded(f["input_ids"], 0) for f in features]),
        "attention_mask": torch.stack(
            [padded(torch.ones_like(f["input_ids"]), 0) for f in features]
        ),
        "labels": torch.stack([padded(x, -100) if x.ndim else x for x in labels]),
    }


def json_file(stage=0, section=None, **changes):
    values = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "zero_optimization": {"stage": stage},
        **({} if section is None else {"wavemare": section}),
        **changes,
    }
    return {key: value for key, value in values.items() if value is not None}


def arguments(name, config, **changes):
    return TrainingArguments(
        **{
            "output_dir": f"{sys.argv[1]}/{name}",
            "deepspeed": config,
            "use_cpu": DEVICE == "cpu",
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "max_steps": 3,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **changes,
        }
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def file_digest(path):
    """A digest of the weights in a folder for ``from_pretrained``."""
    from safetensors.torch import load_file

    state = load_file(f"{path}/model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(state.keys() - {"lm_head.weight"}):  # the embedding's
        digest.update(name.encode() + state[name].float().numpy().tobytes())
    return digest.hexdigest()
