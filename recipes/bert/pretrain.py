# SPDX-License-Identifier: Apache-2.0
"""Pretrain a BERT by masked language modelling, from the text to a model that fills gaps.

Run it with ``wavemare train bert``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.bert.pretrain \
        --deepspeed_config recipes/bert/pretrain.json

``pretrain.json`` trains two stages with 1F1B; ``--set`` changes it (docs/recipes.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.errors import ConfigError
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
    fill_gap,
    max_positions,
    new_masked_model,
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
from wavemare.training.text import find_text, read_text


@dataclass(frozen=True)
class PretrainArguments(TokenizerArguments, ModelArguments, TrainArguments):
    """Options of BERT pretraining."""

    output: str = option("runs/bert-pretrain", "run folder")
    model_config: str = option(
        str(Path(__file__).with_name("model.json")), "transformers configuration of the model"
    )
    mask_probability: float = option(0.15, "share of tokens to guess")
    prompt: str = option("def [MASK](self):", "text with a [MASK] to fill in at the end")


def main() -> None:
    """Pretrain, evaluate, export and fill a gap."""
    # Options and configuration. Most mistakes are refused here, before torch is imported.
    args = parse_arguments(PretrainArguments)
    setup = prepare(args)
    source = find_text(args)
    shape = read_model_config(args.model_config, args.sequence_length, args)
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    # The text. One process of each host reads and tokenizes it; the others take it from the cache.
    connect(setup)
    size = args.trained_vocabulary
    text = read_text(source, args, "bert", tokenizer=args.tokenizer, vocab_size=size)
    samples, validation = text.masked_samples(
        args.sequence_length, probability=args.mask_probability, seed=args.seed
    )
    wait_for_data(setup)

    # The model, whole on every process.
    model = new_masked_model(args, shape, text.tokenizer, setup.section.tensor_parallel.size)
    text.check_fits(args.sequence_length, model.config)
    check_gap(text.tokenizer, args.prompt, max_positions(model.config))
    panel = start_up_panel(setup, model, text.describe())
    recording.screen.panel("wavemare: BERT pretraining", panel)

    # The engine. The JSON decides the layout, the optimizer and the learning rate.
    engine, *_ = wavemare.initialize(model=model, config=setup.config_for(model))
    recording.screen.note(setup.layout or engine.layout)
    seed_dropout(engine, args.seed)
    batches = ResumableLoader.of(engine, samples, seed=args.seed)
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

    # Evaluation, export, and what the model puts into a gap.
    if not stop:
        engine.synchronize()  # what is evaluated is what is exported
        loss = evaluation.loss(setup.final_samples)
        recording.run.log(args.max_steps, eval_loss=loss)
        folder = setup.folder / "model"
        wavemare.save_pretrained(engine, folder, tokenizer=text.tokenizer)
        if setup.rank == 0:
            recording.screen.note(f"\n{fill_gap(folder, args.prompt)}\n")
        figures = {"eval_loss": loss, **evaluation.counts(setup.final_samples)}
        figures["parameters"] = count_parameters(setup, model)
        recording.finish(figures, partial(text.unigram_baselines, args.sequence_length))
    leave()


def check_gap(tokenizer: Any, prompt: str, positions: int) -> None:
    """Check that a prompt has a gap to fill in and fits the model.

    Raises:
        ConfigError: It has none, or is too long.
    """
    tokens = tokenizer(prompt)["input_ids"]
    if tokenizer.mask_token_id not in tokens or len(tokens) > positions:
        reason = f"it has no {tokenizer.mask_token}, or more than the model's {positions} tokens"
        raise ConfigError("--prompt", prompt, reason, "Give a text such as 'def [MASK](self):'")


if __name__ == "__main__":
    run_main(main)
