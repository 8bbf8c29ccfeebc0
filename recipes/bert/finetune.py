# SPDX-License-Identifier: Apache-2.0
"""Train a BERT to classify texts, from a table of texts and labels to a model that answers.

By default it learns to tell which standard-library package a snippet comes from, from nothing::

    wavemare train bert/finetune

With a pretrained model, in a folder, and a table of one's own (TSV, CSV or JSONL)::

    hf download google-bert/bert-base-uncased --local-dir bert-base-uncased
    wavemare train bert/finetune -- --model bert-base-uncased --data reviews.tsv --lr 3e-5

Differs from ``gpt/pretrain.py`` in:

* the data: each text has a label;
* the start: the folder ``--model``, or a new model;
* the evaluation: beside the loss it gives accuracy and macro F1;
* the end: the model classifies a text, where the GPT continues one;
* ``finetune.json``: two stages with 1F1B, AdamW. ``--set`` changes it.

Its rate, 1e-3, suits a new or a very small model. The BERT paper fine-tunes at 2e-5 to 5e-5: give
``--lr``. It does not keep the best model, and a text has one label, not several.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import wavemare
from wavemare.data.classification import majority_baseline, prepare_encoded
from wavemare.data.loader import ResumableLoader
from wavemare.failure import run_main
from wavemare.training.arguments import ModelArguments, TrainArguments, option, parse_arguments
from wavemare.training.evaluation import count_samples, evaluate_classes, evaluation_loader
from wavemare.training.models import make_or_load_classifier
from wavemare.training.run import disconnect, start_run
from wavemare.training.samples import classify
from wavemare.training.text import read_labelled_texts

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
    # Arguments. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(FinetuneArguments)
    run = start_run(args)  # checks JSON, data, model; makes the run folder; joins the process group

    # Texts and model, whole on every process. One process of each host reads the texts.
    corpus = read_labelled_texts(run.source, args)
    num_classes = len(corpus.label_names)
    tokenizer, model = make_or_load_classifier(args, corpus, run.tensor_parallel)
    train_samples, validation = prepare_encoded(corpus, tokenizer, args.sequence_length)
    run.wait_for_all()  # a host may read its data for hours
    run.show("BERT classification", model, corpus.describe())  # prints what is trained, and how
    run.balance(model)  # with --balance: writes the devices' shares into run.config

    # Engine. finetune.json decides: two stages with 1F1B, 32 samples in a step, and AdamW, whose
    # rate rises to 1e-3 and falls to a tenth.
    engine, *_ = wavemare.initialize(model=model, config=run.config)

    # Each replica reads its own samples.
    train_loader = ResumableLoader.of(engine, train_samples, seed=args.seed)
    eval_loader = evaluation_loader(engine, validation, run.eval_samples)  # few, between steps
    final_loader = evaluation_loader(engine, validation, run.final_samples)  # more, at the end

    # Start. Dropout gets its seed. With --resume, engine and loader take the newest checkpoint.
    first = run.resume_or_start(engine, train_loader)

    # Loop.
    with run.recording(engine):  # metrics and progress; in here, SIGTERM only sets a flag
        for step in run.steps(first):  # to --max_steps; SIGTERM ends all ranks after the same step
            # One optimizer step: forward and backward of each micro-batch, then the update.
            loss = engine.train_batch(train_loader)  # a tensor: the mean of the step
            run.record(step, loss)  # shows it; every --log_interval steps, writes a line of metrics
            if step % args.eval_interval == 0 and step < args.max_steps:  # the final one is below
                run.log_eval(step, **evaluate_classes(engine, eval_loader, num_classes))
            if step % args.save_interval == 0 or run.is_last:  # SIGTERM makes a step the last
                run.save_checkpoint(engine, train_loader)

    # Final evaluation, on more samples; export; the model's answer for a text.
    if not run.stopped:  # by SIGTERM
        engine.synchronize()  # all ranks take one version: with local steps, the mean of replicas
        scores = evaluate_classes(engine, final_loader, num_classes)
        run.log_eval(args.max_steps, **scores)
        wavemare.save_pretrained(engine, run.model_folder, tokenizer=tokenizer)
        if run.rank == 0:
            row = corpus.validation[0]
            expected = corpus.label_names[row["label"]]
            answer = classify(run.model_folder, row["text"])
            print(f"\nThe model in {run.model_folder} classifies:\n{row['text'][:300]}")
            print(f"-> {answer} (it is {expected})\n", flush=True)
        results = {**scores, **count_samples(engine, final_loader, validation)}
        for name, value in majority_baseline(corpus).items():
            results[f"majority {name}"] = value
        run.finish(results)
    disconnect()


if __name__ == "__main__":
    run_main(main)
