# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT-2 on text, from the text to a model that writes.

Run it with ``wavemare train gpt``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.gpt.pretrain \
        --deepspeed_config recipes/gpt/pretrain_pipeline.json

Beside it: ``pretrain_pipemare.json`` (two asynchronous stages, the default of ``wavemare train``),
``pretrain_pipeline.json`` (1F1B), ``pretrain_zero.json`` (data-parallel, ZeRO) and
``pretrain_wave.json`` (Wavelet), all on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    continue_text,
    count_parameters,
    max_positions,
    read_model_config,
    reraise_model_errors,
    start_up_panel,
)
from wavemare.training.setup import (
    Setup,
    connect,
    leave,
    load_run,
    prepare,
    seed_dropout,
    wait_for_data,
)
from wavemare.training.text import TrainingText, find_text, read_text


@dataclass(frozen=True)
class PretrainArguments(TokenizerArguments, ModelArguments, TrainArguments):
    """Options of GPT pretraining."""

    output: str = option("runs/gpt-pretrain", "run folder")
    max_steps: int = option(500, "optimizer steps")
    save_interval: int = option(250, "steps between checkpoints")
    model_config: str = option(
        str(Path(__file__).with_name("model.json")), "transformers configuration of the model"
    )
    prompt: str | None = option(None, "start of the sample text; by default a validation text's")


def main(
    options: type[PretrainArguments] = PretrainArguments,
    title: str = "wavemare: GPT pretraining",
    adjust: Callable[[Setup], Any] = lambda setup: None,
) -> None:
    """Pretrain, evaluate, export and sample.

    Args:
        options: Of the command line.
        title: Of the run, on the screen.
        adjust: Changes the configuration for the model, and returns an ``lr_scheduler`` or None.
    """
    # Options first: most mistakes are refused before torch and DeepSpeed are imported.
    args = parse_arguments(options)
    setup = prepare(args)
    source = find_text(args)
    shape = read_model_config(args.model_config, args.sequence_length, args.sizes())
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    connect(setup)
    lr_scheduler = adjust(setup)
    size = args.trained_vocabulary
    text = read_text(source, args, "gpt", tokenizer=args.tokenizer, vocab_size=size)
    wait_for_data(setup)
    model = make_model(args, shape, text.tokenizer, setup.section.tensor_parallel.size)
    learn(setup, recording, model, text, args.prompt, title, lr_scheduler)


def learn(
    setup: Setup,
    recording: Recording,
    model: Any,
    text: TrainingText,
    prompt: str | None,
    title: str,
    lr_scheduler: Any = None,
) -> None:
    """Train, then evaluate and export the model and let it write."""
    length = setup.arguments.sequence_length
    text.check_fits(length, model.config)
    prompt = text.check_prompt(prompt, max_positions(model.config))
    recording.screen.panel(title, start_up_panel(setup, model, text.describe()))
    data = text.causal_samples(length, setup.num_samples, setup.arguments.seed)
    options = {"shuffle": text.split is None, "lr_scheduler": lr_scheduler}
    evaluation = train(setup, recording, model, *data, eval_loss, **options)
    if evaluation is not None:
        evaluation.engine.synchronize()  # what is evaluated is what is exported
        samples, exported = setup.final_samples, setup.folder / "model"
        loss = evaluation.loss(samples)
        recording.run.log(setup.arguments.max_steps, eval_loss=loss)
        wavemare.save_pretrained(evaluation.engine, exported, tokenizer=text.tokenizer)
        if setup.rank == 0:
            recording.screen.note(f"\n{continue_text(exported, prompt, setup.arguments.seed)}\n")
        figures = {"eval_loss": loss, **evaluation.counts(samples)}
        figures["parameters"] = count_parameters(setup, model)
        recording.finish(figures, partial(text.baselines, length, samples))
    leave()


def make_model(
    args: ModelArguments, shape: dict[str, Any], tokenizer: Any, tensor_parallel: int = 1
) -> Any:
    """Return a new model of a checked configuration; without a vocabulary size, the tokenizer's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    end, rows = tokenizer.eos_token_id, args.padded(len(tokenizer), tensor_parallel)
    config = {"vocab_size": rows, "bos_token_id": end, "eos_token_id": end, **shape}
    with reraise_model_errors("--model_config", args.model_config):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


Evaluate = Callable[[Any, int | None], Mapping[str, float]]
"""Given an `Evaluation` and a number of samples (None for all), measures the model."""


def eval_loss(evaluation: Any, num_samples: int | None) -> dict[str, float]:
    """Return the mean loss on validation samples."""
    return {"eval_loss": evaluation.loss(num_samples)}


def train(
    setup: Setup,
    recording: Recording,
    model: Any,
    samples: Any,
    validation: Any,
    evaluate: Evaluate,
    *,
    shuffle: bool = True,
    lr_scheduler: Any = None,
) -> Any:
    """Train, with evaluations and checkpoints on the way.

    Without ``lr_scheduler`` the learning rate follows the JSON configuration.

    Returns:
        The evaluation, which has the engine; None if SIGTERM has ended the training early.
    """
    from wavemare.engine import Interruption

    args, checkpoints = setup.arguments, str(setup.folder / "checkpoints")

    # The JSON configuration decides the layout, the optimizer and the schedule.
    plan = setup.balance.measure(model, setup.batch, sequence_length=args.sequence_length)
    engine, *_ = wavemare.initialize(
        model=model, config=setup.balance.config, lr_scheduler=lr_scheduler
    )
    recording.screen.note(plan or engine.layout)
    seed_dropout(engine, args.seed)
    evaluation = Evaluation(engine, validation)
    batches = ResumableLoader(
        samples,
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        data_rank=engine.data_rank,
        data_world_size=engine.data_world_size,
        seed=args.seed,
        shuffle=shuffle,
        shares=setup.balance.shares,
    )
    if setup.resume:
        recording.seconds = load_run(engine, checkpoints, batches, args.max_steps)
        recording.screen.note(f"resumed after step {engine.global_steps}")

    recording.engine = engine
    recording.tokens = engine.train_batch_size() * args.sequence_length
    losses: list[Any] = []
    stop = False
    with recording, Interruption(lead=engine.step_lead) as interruption:
        setup.balance.save(setup.rank)
        for step in range(engine.global_steps + 1, args.max_steps + 1):
            with recording.step(step):
                losses.append(engine.train_batch(batches))
            stop = step < args.max_steps and interruption.stops_after(step)
            last = stop or step == args.max_steps
            if step % args.log_interval == 0 or last:
                # Reading a loss waits for the device: not every step.
                recording.log(step, loss=float(sum(losses) / len(losses)))
                losses.clear()
            if step % args.eval_interval == 0 and not last:
                with recording.paused():
                    recording.run.log(step, **evaluate(evaluation, setup.eval_samples))
            if step % args.save_interval == 0 or last:
                with recording.saving(step, f"step-{step:06d}") as tag:
                    state = {"loader": batches.state_dict(), "seconds": recording.training_seconds}
                    engine.save_checkpoint(checkpoints, tag, client_state=state)
            if stop:  # by SIGTERM
                recording.stopped(step)
                break
        engine.finish_saving()
    return None if stop else evaluation


if __name__ == "__main__":
    run_main(main)
