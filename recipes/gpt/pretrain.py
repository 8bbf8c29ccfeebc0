# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT-2 on text, from the text to a model that writes.

Run it with ``wavemare train gpt``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.gpt.pretrain \
        --deepspeed_config recipes/gpt/pretrain.json

``pretrain.json`` trains two asynchronous stages (PipeMare). ``--set`` changes it: docs/recipes.md
has the words for 1F1B, ZeRO, waves, sparse gradients and slow links.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.failure import run_main
from wavemare.observe.recording import Recording
from wavemare.training.arguments import (
    ModelArguments,
    TokenizerArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.models import (
    Evaluation,
    count_parameters,
    describe_model,
    export,
    max_positions,
    new_causal_model,
    start_up_panel,
    tokenizer_of,
)
from wavemare.training.samples import continue_text
from wavemare.training.setup import (
    connect,
    leave,
    load_run,
    prepare,
    save_run,
    seed_dropout,
    wait_for_data,
)
from wavemare.training.text import find_text, read_text


@dataclass(frozen=True)
class PretrainArguments(TokenizerArguments, ModelArguments, TrainArguments):
    """Options of GPT pretraining."""

    causal = True

    output: str = option("runs/gpt-pretrain", "run folder")
    max_steps: int = option(250, "optimizer steps")
    save_interval: int = option(250, "steps between checkpoints")
    model_config: str = option(
        str(Path(__file__).with_name("model.json")), "transformers configuration of the model"
    )
    prompt: str | None = option(None, "start of the sample text; by default a validation text's")


def main() -> None:
    """Pretrain, evaluate, export and sample."""
    # Options and configuration. Most mistakes are refused here, before torch is imported.
    args = parse_arguments(PretrainArguments)
    setup = prepare(args)
    source = find_text(args)
    model_config = describe_model(args)
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    # The text. One process of each host reads and tokenizes it; the others take it from the cache.
    connect(setup)  # before the model: it seeds the weights alike on all processes
    size = args.trained_vocabulary
    text = read_text(source, args, "gpt", tokenizer=tokenizer_of(args), vocab_size=size)
    samples, validation = text.causal_samples(args.sequence_length, setup.num_samples, args.seed)
    wait_for_data(setup)  # a collective would time out while one host still reads

    # The model: new on every process, or a checkpoint's, of which each process reads its own part.
    model = new_causal_model(args, model_config, text.tokenizer, setup.section.tensor_parallel.size)
    text.check_fits(args.sequence_length, model.config)
    prompt = text.check_prompt(args.prompt, max_positions(model.config))
    panel = start_up_panel(setup, model, text.describe())
    recording.screen.panel("wavemare: GPT pretraining", panel)

    # The engine. The JSON decides the layout, the optimizer and the learning rate.
    engine, *_ = wavemare.initialize(model=model, config=setup.config_for(model))
    recording.screen.note(setup.layout or engine.layout)
    seed_dropout(engine, args.seed)  # before load_run, which restores what was saved
    # Data in Megatron's order has its own.
    batches = ResumableLoader.of(engine, samples, seed=args.seed, shuffle=text.split is None)
    evaluation = Evaluation(engine, validation)
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
                    recording.run.log(step, eval_loss=evaluation.loss(setup.eval_samples))
            if last or step % args.save_interval == 0:
                save_run(setup, engine, batches, recording)
            if stop:
                recording.stopped(step)
                break
        engine.finish_saving()

    # Evaluation, export and a sample of what the model writes.
    if not stop:
        engine.synchronize()  # what is evaluated is what is exported
        loss = evaluation.loss(setup.final_samples)
        recording.run.log(args.max_steps, eval_loss=loss)
        folder = setup.folder / "model"
        export(args, engine, folder, text.tokenizer)
        if setup.rank == 0:
            recording.screen.note(f"\n{continue_text(folder, prompt, args.seed)}\n")
        figures = {"eval_loss": loss, **evaluation.counts(setup.final_samples)}
        figures["parameters"] = count_parameters(setup, model)
        baselines = partial(text.baselines, args.sequence_length, setup.final_samples)
        recording.finish(figures, baselines)
    leave()


if __name__ == "__main__":
    run_main(main)
