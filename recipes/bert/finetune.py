# SPDX-License-Identifier: Apache-2.0
"""Train a BERT to classify texts, from a table of texts and labels to a model that answers.

By default it learns to tell which standard-library package a snippet comes from, from nothing::

    wavemare train bert/finetune

With a pretrained model and a table of one's own (TSV, CSV or JSONL)::

    wavemare train bert/finetune -- --model runs/bert-pretrain/model --data reviews.tsv
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wavemare.data.sources import resolve
from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.observe.recording import Recording
from wavemare.recipes.bert.pretrain import finish
from wavemare.recipes.gpt.pretrain import train
from wavemare.training.arguments import (
    ModelArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.models import (
    check_model_folder,
    max_positions,
    read_model_config,
    reraise_model_errors,
    start_up_panel,
)
from wavemare.training.setup import connect, leave, prepare, wait_for_data


@dataclass(frozen=True)
class FinetuneArguments(ModelArguments, TrainArguments):
    """Options of BERT finetuning."""

    output: str = option("runs/bert-finetune", "run folder")
    model: str | None = option(
        None, "Hugging Face folder to start from; a new small model if omitted"
    )
    model_config: str = option(
        str(Path(__file__).with_name("model.json")), "transformers configuration of a new model"
    )
    label_column: str = option("label", "column of the labels")
    max_steps: int = option(300, "optimizer steps")


def main() -> None:
    """Train, evaluate, export and classify."""
    args = parse_arguments(FinetuneArguments)
    check_options(args)
    setup = prepare(args)
    shape: dict[str, Any] = {}
    if args.model is not None:
        check_model_folder(args.model, args.sequence_length)
    else:
        shape = read_model_config(args.model_config, args.sequence_length, args.sizes())
    source = resolve(args.data)
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    connect(setup)

    from wavemare.data.classification import (
        majority_baseline,
        prepare_classification,
        prepare_encoded,
    )

    cache = Path(args.cache).expanduser()
    columns = {"text_column": args.text_column, "label_column": args.label_column}
    corpus = prepare_classification(source, cache, **columns)
    tokenizer, model = make_model(args, corpus, shape, setup.section.tensor_parallel.size)
    samples, validation = prepare_encoded(corpus, tokenizer, args.sequence_length)
    wait_for_data(setup)
    rows = {
        "name": corpus.name,
        "texts": f"{len(samples)} to train, {len(validation)} for validation",
        "classes": ", ".join(corpus.label_names),
    }
    panel = start_up_panel(setup, model, rows)
    recording.screen.panel("wavemare: BERT classification", panel)
    evaluate = partial(measure, num_classes=len(corpus.label_names))
    evaluation = train(setup, recording, model, samples, validation, evaluate)
    if evaluation is not None:
        exported = finish(setup, recording, model, tokenizer, evaluation, evaluate)
        if setup.rank == 0:
            text, label = corpus.validation[0]["text"], corpus.validation[0]["label"]
            answer = f"{classify(exported, text)} (it is {corpus.label_names[label]})"
            recording.screen.note(f"\n{text[:300]}\n-> {answer}\n")
        majority = majority_baseline(corpus)
        recording.finish({f"majority {name}": value for name, value in majority.items()})
    leave()


def check_options(args: FinetuneArguments) -> None:
    """Refuse options that have no effect.

    Raises:
        ConfigError: ``--split`` is given.
    """
    if args.split is not None:
        reason = (
            "labelled texts are no Megatron data, and their validation part is chosen by its hash"
        )
        raise ConfigError("--split", args.split, reason, "Leave it out")


def measure(evaluation: Any, num_samples: int | None, *, num_classes: int) -> Mapping[str, float]:
    """Return loss, accuracy and macro F1 on validation samples, the same on all ranks."""
    import torch
    from torch import distributed

    engine = evaluation.engine
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device=engine.device)
    losses = []
    for batch in evaluation.batches(num_samples):
        loss, logits = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
        losses.append(float(loss))
        if logits is not None:  # in a pipeline the last stage has them
            labels = batch["labels"].to(logits.device)
            cells = labels * num_classes + logits.argmax(-1)
            confusion += torch.bincount(cells, minlength=num_classes**2).view_as(confusion)
    distributed.all_reduce(confusion)
    return {"eval_loss": sum(losses) / len(losses), **scores(confusion)}


def scores(confusion: Any) -> dict[str, float]:
    """Return accuracy and macro F1 of a confusion matrix: rows are labels, columns answers."""
    right = confusion.diag().double()
    f1 = 2 * right / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return {"accuracy": float(right.sum() / confusion.sum()), "macro_f1": float(f1.mean())}


def make_model(
    args: FinetuneArguments, corpus: Any, shape: dict[str, Any], tensor_parallel: int
) -> tuple[Any, Any]:
    """Return the tokenizer and the model to start from: pretrained, or new."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from wavemare.data.tokenizer import cached_tokenizer, load_tokenizer

    names = dict(enumerate(corpus.label_names))
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    if args.model is not None:
        tokenizer = load_tokenizer(args.model, "--model")
        with reraise_model_errors("--model", args.model):
            model = AutoModelForSequenceClassification.from_pretrained(
                args.model, dtype="float32", num_labels=len(names), **labels
            )
        return tokenizer, model
    cache = Path(args.cache).expanduser()
    tokenizer = cached_tokenizer(corpus.train, args.trained_vocabulary, "bert", cache)
    rows = args.padded(len(tokenizer), tensor_parallel)
    own = {"num_labels": len(names), "pad_token_id": tokenizer.pad_token_id, **labels}
    with reraise_model_errors("--model_config", args.model_config):
        config = AutoConfig.for_model(**{"vocab_size": rows, **shape, **own})
        return tokenizer, AutoModelForSequenceClassification.from_config(config)


def classify(folder: Path, text: str) -> str:
    """Return the exported model's class of a text, and how sure it is."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    room = max_positions(model.config)
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=room)
    with torch.no_grad():
        probabilities = model(**inputs).logits[0].softmax(-1)
    best = int(probabilities.argmax())
    return f"{model.config.id2label[best]} {float(probabilities[best]):.0%}"


if __name__ == "__main__":
    run_main(main)
