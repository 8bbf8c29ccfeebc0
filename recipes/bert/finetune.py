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
from pathlib import Path
from typing import Any

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.data.sources import resolve
from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.observe.recording import Recording
from wavemare.training.arguments import (
    ModelArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.models import (
    Evaluation,
    check_model_folder,
    classify,
    count_parameters,
    load_classifier,
    read_model_config,
    start_up_panel,
)
from wavemare.training.setup import (
    connect,
    leave,
    load_run,
    prepare,
    save_run,
    seed_dropout,
    wait_for_data,
)


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
    # Options and configuration. Most mistakes are refused here, before torch is imported.
    args = parse_arguments(FinetuneArguments)
    check_options(args)
    setup = prepare(args)
    shape: dict[str, Any] = {}
    if args.model is not None:
        check_model_folder(args.model, args.sequence_length)
    else:
        shape = read_model_config(args.model_config, args.sequence_length, args)
    source = resolve(args.data)
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    # The texts and the model, whole on every process.
    connect(setup)

    from wavemare.data.classification import (
        majority_baseline,
        prepare_classification,
        prepare_encoded,
    )

    cache = Path(args.cache).expanduser()
    columns = {"text_column": args.text_column, "label_column": args.label_column}
    corpus = prepare_classification(source, cache, **columns)
    tokenizer, model = load_classifier(args, corpus, shape, setup.section.tensor_parallel.size)
    samples, validation = prepare_encoded(corpus, tokenizer, args.sequence_length)
    wait_for_data(setup)
    facts = {
        "name": corpus.name,
        "texts": f"{len(samples)} to train, {len(validation)} for validation",
        "classes": ", ".join(corpus.label_names),
    }
    panel = start_up_panel(setup, model, facts)
    recording.screen.panel("wavemare: BERT classification", panel)

    # The engine. The JSON decides the layout, the optimizer and the learning rate.
    engine, *_ = wavemare.initialize(model=model, config=setup.config_for(model))
    recording.screen.note(setup.layout or engine.layout)
    seed_dropout(engine, args.seed)
    batches = ResumableLoader.of(engine, samples, seed=args.seed)
    evaluation = Evaluation(engine, validation)
    classes = len(corpus.label_names)
    recording.engine = engine
    recording.tokens = engine.train_batch_size() * args.sequence_length
    if setup.resume:
        load_run(setup, engine, batches, recording)

    # Training, until the last step or SIGTERM.
    from wavemare.engine import Interruption

    losses: list[Any] = []
    stop = False
    with recording, Interruption(lead=engine.step_lead) as interruption:
        for step in range(engine.global_steps + 1, args.max_steps + 1):
            with recording.step(step):
                losses.append(engine.train_batch(batches))
            stop = step < args.max_steps and interruption.stops_after(step)
            last = stop or step == args.max_steps
            if last or step % args.log_interval == 0:
                # Reading a loss waits for the device: not every step.
                recording.log(step, loss=float(sum(losses) / len(losses)))
                losses.clear()
            if step % args.eval_interval == 0 and not last:
                with recording.paused():  # of the weights as they are, without a drain
                    recording.run.log(step, **measure(evaluation, setup.eval_samples, classes))
            if last or step % args.save_interval == 0:
                save_run(setup, engine, batches, recording)
            if stop:
                recording.stopped(step)
                break
        engine.finish_saving()

    # Evaluation, export, and the model's answer for a text.
    if not stop:
        engine.synchronize()  # what is evaluated is what is exported
        found = measure(evaluation, setup.final_samples, classes)
        recording.run.log(args.max_steps, **found)
        folder = setup.folder / "model"
        wavemare.save_pretrained(engine, folder, tokenizer=tokenizer)
        if setup.rank == 0:
            text, label = corpus.validation[0]["text"], corpus.validation[0]["label"]
            answer = f"{classify(folder, text)} (it is {corpus.label_names[label]})"
            recording.screen.note(f"\n{text[:300]}\n-> {answer}\n")
        figures = {**found, **evaluation.counts(setup.final_samples)}
        figures["parameters"] = count_parameters(setup, model)
        majority = majority_baseline(corpus)
        figures |= {f"majority {name}": value for name, value in majority.items()}
        recording.finish(figures)
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


def measure(evaluation: Any, num_samples: int | None, num_classes: int) -> Mapping[str, float]:
    """Return loss, accuracy and macro F1 on validation samples, the same on all ranks."""
    import torch
    from torch import distributed

    from wavemare.data.classification import scores

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


if __name__ == "__main__":
    run_main(main)
