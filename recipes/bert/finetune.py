# SPDX-License-Identifier: Apache-2.0
"""Train a BERT to classify texts, from a table of texts and labels to a model that answers.

By default it learns to tell which standard-library package a snippet comes from, from nothing::

    wavemare train bert/finetune

With a pretrained model and a table of one's own (TSV, CSV or JSONL)::

    wavemare train bert/finetune -- --model runs/bert-pretrain/model --data reviews.tsv
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.recipes.arguments import JobArguments, parse_arguments
from wavemare.recipes.job import Job
from wavemare.recipes.pretrained import check_model_folder, longest, naming, read_model_config


@dataclass
class FinetuneArguments(JobArguments):
    """Options of BERT finetuning."""

    output: str = field(default="runs/bert-finetune", metadata={"help": "run folder"})
    model: str | None = field(
        default=None,
        metadata={"help": "Hugging Face folder to start from; a new small model if omitted"},
    )
    model_config: str = field(
        default=str(Path(__file__).with_name("model.json")),
        metadata={"help": "transformers configuration of a new model"},
    )
    vocab_size: int = field(default=4096, metadata={"help": "tokens of a new model's BPE"})
    sequence_length: int = field(default=128, metadata={"help": "tokens per text, cut or padded"})
    label_column: str = field(default="label", metadata={"help": "column of the labels"})
    max_steps: int = field(default=300, metadata={"help": "optimizer steps"})


def main() -> None:
    """Train, evaluate, export, reload and classify."""
    arguments = parse_arguments(FinetuneArguments)
    if arguments.split is not None:
        reason = "labelled texts are no Megatron data, and a part is held out by its hash"
        raise ConfigError("--split", arguments.split, reason, "Leave it out")
    job = Job(arguments, "wavemare: BERT classification")
    values: dict[str, Any] = {}
    if arguments.model is not None:
        check_model_folder(arguments.model, arguments.sequence_length)
    else:
        values = read_model_config(
            arguments.model_config, arguments.sequence_length, arguments.megatron.model
        )

    from wavemare.data import encode_labelled, load_classification, majority_baseline, resolve

    source = resolve(arguments.data)
    job.connect()
    corpus = load_classification(
        source, text_column=arguments.text_column, label_column=arguments.label_column
    )
    tokenizer, model = start(arguments, corpus, Path(os.path.expanduser(arguments.cache)), values)
    train = encode_labelled(corpus.train, tokenizer, arguments.sequence_length)
    held_out = encode_labelled(corpus.validation, tokenizer, arguments.sequence_length)
    panel = {
        "name": corpus.name,
        "texts": f"{len(train)} to train, {len(held_out)} held out",
        "classes": ", ".join(corpus.label_names),
    }
    job.build(model, panel, sequence_length=arguments.sequence_length)

    def evaluate(num_samples: int | None) -> Mapping[str, float]:
        return measure(job, held_out, num_samples, num_classes=len(corpus.label_names))

    job.fit(job.loader(train, held_out), evaluate)
    results = evaluate(None)
    job.export(tokenizer)

    def answer() -> str:
        example = corpus.validation[0]
        label = corpus.label_names[example["label"]]
        text = example["text"]
        return f"{text[:300]}\n-> {classify(job.exported, text)} (it is {label})"

    baseline = majority_baseline(corpus)
    majority = {
        "majority accuracy": baseline.accuracy,
        "majority macro_f1": baseline.macro_f1,
    }
    job.finish({**results, **majority}, use=answer)


def measure(
    job: Job, dataset: Any, num_samples: int | None, *, num_classes: int
) -> Mapping[str, float]:
    """Return loss, accuracy and macro F1 on held-out samples, the same on all ranks."""
    import torch
    from torch import distributed

    confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device=job.engine.device)
    losses = []
    for batch in job.held_out_batches(dataset, num_samples):
        loss, logits = job.engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
        losses.append(float(loss))
        if logits is not None:  # in a pipeline the last stage has them
            labels = batch["labels"].to(logits.device)
            cells = labels * num_classes + logits.argmax(-1)
            confusion += torch.bincount(cells, minlength=num_classes**2).view_as(confusion)
    distributed.all_reduce(confusion)
    return {"held_out_loss": sum(losses) / len(losses), **scores(confusion)}


def scores(confusion: Any) -> dict[str, float]:
    """Return accuracy and macro F1 of a confusion matrix: rows are labels, columns answers."""
    right = confusion.diag().double()
    f1 = 2 * right / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return {"accuracy": float(right.sum() / confusion.sum()), "macro_f1": float(f1.mean())}


def start(
    arguments: FinetuneArguments, corpus: Any, cache: Path, values: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the tokenizer and the model to start from: pretrained, or new."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from wavemare.data import cached_tokenizer, load_tokenizer

    names = dict(enumerate(corpus.label_names))
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    if arguments.model is not None:
        tokenizer = load_tokenizer(arguments.model)
        with naming("--model", arguments.model):
            model = AutoModelForSequenceClassification.from_pretrained(
                arguments.model, dtype="float32", num_labels=len(names), **labels
            )
        return tokenizer, model
    tokenizer = cached_tokenizer(corpus.train, arguments.vocab_size, "bert", cache)
    with naming("--model_config", arguments.model_config):
        config = AutoConfig.for_model(
            **{"vocab_size": arguments.megatron.vocabulary(len(tokenizer)), **values, **labels},
            num_labels=len(names),
            pad_token_id=tokenizer.pad_token_id,
        )
        return tokenizer, AutoModelForSequenceClassification.from_config(config)


def classify(folder: Path, text: str) -> str:
    """Return the exported model's class of a text, and how sure it is."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    room = longest(model.config)
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=room)
    with torch.no_grad():
        probabilities = model(**inputs).logits[0].softmax(-1)
    best = int(probabilities.argmax())
    return f"{model.config.id2label[best]} {float(probabilities[best]):.0%}"


if __name__ == "__main__":
    run_main(main)
