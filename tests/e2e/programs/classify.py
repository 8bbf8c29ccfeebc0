# SPDX-License-Identifier: Apache-2.0
"""A script in the manner of transformers' examples: it trains, evaluates and predicts classes.

It knows of no pipeline but for its first line.
"""

import wavemare.hf.patch  # noqa: F401, I001

from dataclasses import dataclass, field
from pathlib import Path

import numpy
from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    tokenizer_name: str = field(metadata={"help": "Folder of the tokenizer."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "JSON lines with sentence and label."})
    validation_file: str = field(metadata={"help": "As train_file."})
    max_seq_length: int = field(default=32, metadata={"help": "Longer texts are cut."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, args = parser.parse_args_into_dataclasses()
    checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    set_seed(args.seed)
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("json", data_files=files)
    labels = sorted(raw["train"].unique("label"))
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)

    def encode(rows):
        encoded = tokenizer(rows["sentence"], truncation=True, max_length=data_args.max_seq_length)
        encoded["label"] = [labels.index(label) for label in rows["label"]]
        return encoded

    with args.main_process_first(desc="tokenization"):
        data = raw.map(encode, batched=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=data_args.max_seq_length,
        num_labels=len(labels),
    )

    def compute_metrics(prediction):
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"accuracy": float(numpy.mean(right))}

    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    print(f"goes on from {checkpoint}")
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", {**metrics, "train_samples": len(data["train"])})
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    predictions = trainer.predict(data["validation"].remove_columns("label")).predictions
    if trainer.is_world_process_zero():
        chosen = [labels[number] for number in predictions.argmax(-1)]
        Path(args.output_dir, "predictions.txt").write_text("\n".join(chosen))
    trainer.create_model_card(tasks="text-classification")


if __name__ == "__main__":
    main()
