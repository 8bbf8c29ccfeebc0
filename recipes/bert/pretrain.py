# SPDX-License-Identifier: Apache-2.0
"""Pretrain a BERT by masked language modelling, from the text to a model that fills gaps.

Run it with ``wavemare train bert``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.bert.pretrain \
        --deepspeed_config recipes/bert/pretrain_pipeline.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    max_positions,
    read_model_config,
    reraise_model_errors,
    start_up_panel,
)
from wavemare.training.setup import Setup, connect, leave, load_run, prepare, seed_dropout
from wavemare.training.text import TrainingText, find_text, read_text


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
    # Options first: most mistakes are refused before torch and DeepSpeed are imported.
    args = parse_arguments(PretrainArguments)
    setup = prepare(args)
    source = find_text(args)
    shape = read_model_config(args.model_config, args.sequence_length, args.sizes())
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    connect(setup)
    text = read_text(source, args, "bert", tokenizer=args.tokenizer, vocab_size=args.vocab_size)
    model = make_model(args, shape, text.tokenizer, setup.section.tensor_parallel.size)
    check_gap(text.tokenizer, args.prompt, max_positions(model.config))
    samples, validation = masked_samples(args, text, model.config)

    panel = start_up_panel(setup, model, text.describe())
    recording.screen.panel("wavemare: BERT pretraining", panel)
    evaluation = train(setup, recording, model, samples, validation, eval_loss)
    if evaluation is not None:
        exported = finish(setup, recording, model, text.tokenizer, evaluation, eval_loss)
        if setup.rank == 0:
            recording.screen.note(f"\n{fill(exported, args.prompt)}\n")
        baselines = text.cross_entropies(args.sequence_length)
        unigram = {name: value for name, value in baselines.items() if name == "unigram"}
        recording.finish({f"{name} cross-entropy": x for name, x in unigram.items()}, unigram)
    leave()


Evaluate = Callable[[Any, int | None], Mapping[str, float]]
"""Given an `Evaluation` and a number of samples (None for all), measures the model."""


def train(
    setup: Setup,
    recording: Recording,
    model: Any,
    samples: Any,
    validation: Any,
    evaluate: Evaluate,
) -> Any:
    """Train, with evaluations and checkpoints on the way.

    Returns:
        The evaluation, which has the engine; None if SIGTERM has ended the training early.
    """
    from wavemare.engine import Interruption

    args, checkpoints = setup.arguments, str(setup.folder / "checkpoints")

    # The JSON configuration decides the layout, the optimizer and the schedule.
    plan = setup.balance.measure(model, setup.batch, sequence_length=args.sequence_length)
    engine, *_ = wavemare.initialize(model=model, config=setup.balance.config)
    recording.screen.note(plan or engine.layout)
    seed_dropout(engine, args.seed)
    evaluation = Evaluation(engine, validation)
    batches = ResumableLoader(
        samples,
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        data_rank=engine.data_rank,
        data_world_size=engine.data_world_size,
        seed=args.seed,
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


def finish(
    setup: Setup,
    recording: Recording,
    model: Any,
    tokenizer: Any,
    evaluation: Any,
    evaluate: Evaluate,
) -> Path:
    """Evaluate the trained model and export it; return its folder."""
    found = evaluate(evaluation, setup.final_samples)
    recording.run.log(setup.arguments.max_steps, **found)
    parameters = count_parameters(setup, model)
    recording.results = {**found, "parameters": parameters, **recording.results}
    exported = setup.folder / "model"
    wavemare.save_pretrained(evaluation.engine, exported, tokenizer=tokenizer)
    return exported


def eval_loss(evaluation: Any, num_samples: int | None) -> dict[str, float]:
    """Return the mean loss on validation samples."""
    return {"eval_loss": evaluation.loss(num_samples)}


def make_model(
    args: ModelArguments, shape: dict[str, Any], tokenizer: Any, tensor_parallel: int = 1
) -> Any:
    """Return a new BERT of a checked configuration, with the tokenizer's vocabulary."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    rows = args.padded(len(tokenizer), tensor_parallel)
    config = {"vocab_size": rows, "pad_token_id": tokenizer.pad_token_id, **shape}
    with reraise_model_errors("--model_config", args.model_config):
        return AutoModelForMaskedLM.from_config(AutoConfig.for_model(**config))


def masked_samples(args: PretrainArguments, text: TrainingText, config: Any) -> tuple[Any, Any]:
    """Return samples with gaps to fill, to train on and to validate on."""
    from wavemare.data.samples import MaskedDataset

    stores = text.single()
    text.check_fits(args.sequence_length, config)
    options: dict[str, Any] = {"probability": args.mask_probability, "seed": args.seed}
    train, validation = (
        MaskedDataset(store, args.sequence_length, text.tokenizer, **options) for store in stores
    )
    return train, validation


def check_gap(tokenizer: Any, prompt: str, positions: int) -> None:
    """Check that a prompt has a gap to fill in and fits the model.

    Raises:
        ConfigError: It has none, or is too long.
    """
    tokens = tokenizer(prompt)["input_ids"]
    if tokenizer.mask_token_id not in tokens or len(tokens) > positions:
        reason = f"it has no {tokenizer.mask_token}, or more than the model's {positions} tokens"
        raise ConfigError("--prompt", prompt, reason, "Give a text such as 'def [MASK](self):'")


def fill(folder: Path, prompt: str, guesses: int = 5) -> str:
    """Return the exported model's likeliest words for the gap in a prompt."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    gap = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[:1, 0]
    with torch.no_grad():
        probabilities = model(**inputs).logits[0, gap[0]].softmax(-1)
    best = probabilities.topk(guesses)
    words = (
        f"{str(tokenizer.decode([token])).strip()!r} {probability:.0%}"
        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    return f"{prompt}  ->  {', '.join(words)}"


if __name__ == "__main__":
    run_main(main)
