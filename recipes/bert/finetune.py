# SPDX-License-Identifier: Apache-2.0
"""Train a BERT to classify texts, from a table of texts and labels to a model that answers.

By default it learns to tell which standard-library package a snippet comes from, from nothing::

    wavemare train bert/finetune

With a pretrained model and a table of one's own (TSV, CSV or JSONL)::

    wavemare train bert/finetune -- --model runs/bert-pretrain/model --data reviews.tsv

Differs from ``gpt/pretrain.py`` in:

* the data: each text has a label;
* the start: the folder ``--model``, or a new model;
* the evaluation: beside the loss it gives accuracy and macro F1;
* the end: the model classifies a text, where the GPT continues one;
* ``finetune.json``: two stages with 1F1B, AdamW. ``--set`` changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wavemare
from wavemare.data.classification import majority_baseline, prepare_encoded
from wavemare.data.loader import ResumableLoader
from wavemare.engine import Interruption
from wavemare.failure import run_main
from wavemare.observe import Recording
from wavemare.training.arguments import ModelArguments, TrainArguments, option, parse_arguments
from wavemare.training.balance import balance
from wavemare.training.checkpoints import load_checkpoint, save_checkpoint
from wavemare.training.evaluation import count_samples, evaluate_classes, evaluation_loader
from wavemare.training.models import check_model, make_or_load_classifier
from wavemare.training.samples import classify
from wavemare.training.setup import (
    Setup,
    disconnect,
    join_and_seed,
    read_setup,
    seed_dropout,
    wait_for_data,
)
from wavemare.training.start import count_parameters, print_layout, print_start, start_recording
from wavemare.training.text import find_data, read_labelled_texts

MODEL = str(Path(__file__).with_name("model.json"))


@dataclass(frozen=True)
class FinetuneArguments(ModelArguments, TrainArguments):
    """Options of BERT fine-tuning, beside those of all recipes (``--data``, ``--set``, ...)."""

    output: str = option("runs/bert-finetune", "run folder")
    model: str | None = option(
        None, "Hugging Face folder to start from; a new small model if omitted"
    )
    model_config: str = option(MODEL, "transformers configuration of a new model")
    label_column: str = option("label", "column of the labels")
    max_steps: int = option(300, "optimizer steps")


def main() -> None:
    """Train, evaluate, export and classify."""
    # Options and configuration. Most mistakes are refused here, before torch is imported.
    args = parse_arguments(FinetuneArguments)
    setup = read_setup(args)  # the JSON with --set; each "auto" in its scheduler is now a number
    source = find_data(args)
    check_model(args)
    recording = start_recording(args)  # the run folder: metrics, results, and warnings from now on

    # Texts and model, whole on every process. One process of each host reads the texts.
    join_and_seed(setup)  # with the other processes; all draw the same first weights
    corpus = read_labelled_texts(source, args)
    num_classes = len(corpus.label_names)
    tokenizer, model = make_or_load_classifier(args, corpus, setup.tensor_parallel)
    train_samples, validation = prepare_encoded(corpus, tokenizer, args.sequence_length)
    wait_for_data(setup)  # until all hosts have read; a collective would time out
    print_start("BERT classification", setup, model, corpus.describe())

    # Engine. finetune.json decides: two stages with 1F1B, 32 samples in a step, and AdamW, whose
    # rate rises to 1e-3 and falls to a tenth.
    setup = balance(setup, model)  # --balance shares work by speed; else nothing changes
    engine, *_ = wavemare.initialize(model=model, config=setup.config)
    print_layout(setup, engine)
    seed_dropout(engine, args.seed)  # each replica draws its own; a checkpoint brings its state

    # Batches. Each replica reads its own samples.
    train_loader = ResumableLoader.of(engine, train_samples, seed=args.seed)
    eval_loader = evaluation_loader(engine, validation, setup.eval_samples)  # few, between steps
    final_loader = evaluation_loader(engine, validation, setup.final_samples)  # more, at the end

    # Training, then evaluation, export and the model's answer for a text.
    if train(args, setup, engine, train_loader, eval_loader, num_classes, recording):
        engine.synchronize()  # all ranks have one version of the weights from here on
        scores = evaluate_classes(engine, final_loader, num_classes)
        recording.log_eval(args.max_steps, **scores)
        wavemare.save_pretrained(engine, setup.model_folder, tokenizer=tokenizer)
        if setup.rank == 0:
            row = corpus.validation[0]
            expected = corpus.label_names[row["label"]]
            answer = classify(setup.model_folder, row["text"])
            print(f"\nThe model in {setup.model_folder} classifies:\n{row['text'][:300]}")
            print(f"-> {answer} (it is {expected})\n", flush=True)
        results = {**scores, **count_samples(engine, final_loader, validation)}
        results["parameters"] = count_parameters(setup, model)
        for name, value in majority_baseline(corpus).items():
            results[f"majority {name}"] = value
        recording.finish(results)
    disconnect()


def train(
    args: FinetuneArguments,
    setup: Setup,
    engine: Any,
    train_loader: ResumableLoader,
    eval_loader: Any,
    num_classes: int,
    recording: Recording,
) -> bool:
    """Train, from the start or the newest checkpoint, until the last step or SIGTERM.

    SIGTERM stops all processes after the same step.

    Returns:
        Whether the last step is done.
    """
    if setup.resume:
        load_checkpoint(setup, engine, train_loader, recording)
    tokens = engine.train_batch_size() * args.sequence_length  # of a step
    losses: list[Any] = []  # since the last line of the log
    stopped = False
    with recording.training(engine, tokens=tokens), Interruption.of(engine) as interruption:
        for step in range(engine.global_steps + 1, args.max_steps + 1):
            with recording.step(step):
                # One optimizer step: forward and backward of each micro-batch, then the update.
                loss = engine.train_batch(train_loader)  # a tensor: the mean of the step
            losses.append(loss)
            stopped = step < args.max_steps and interruption.stops_after(step)  # by SIGTERM
            is_last = stopped or step == args.max_steps
            if is_last or step % args.log_interval == 0:
                recording.log(step, loss=float(sum(losses) / len(losses)))  # waits for the device
                losses.clear()

            if step % args.eval_interval == 0 and not is_last:
                scores = evaluate_classes(engine, eval_loader, num_classes)
                recording.log_eval(step, **scores)  # eval_loss, accuracy, macro_f1

            if is_last or step % args.save_interval == 0:
                save_checkpoint(setup, engine, train_loader, recording)
            if stopped:
                recording.stopped(step)
                break
        engine.finish_saving()  # waits for a checkpoint that is written in the background
    return not stopped


if __name__ == "__main__":
    run_main(main)
