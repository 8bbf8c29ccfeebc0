# SPDX-License-Identifier: Apache-2.0
"""Pretrain a BERT by masked language modelling, from the text to a model that fills gaps.

Run it with ``wavemare train bert``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.bert.pretrain \
        --deepspeed_config recipes/bert/pretrain.json

Differs from ``gpt/pretrain.py`` in:

* the samples: some tokens are masked, and the model guesses them from both sides;
* the end: the model fills the gap of ``--prompt``, where the GPT continues a text;
* ``pretrain.json``: two stages with 1F1B, AdamW. ``--set`` changes it.

Differs from the BERT paper in:

* the task: there is no prediction of the next sentence, and all samples have one length;
* the masks: each epoch draws new ones. As in the paper, of the chosen tokens 80 % are masked, 10 %
  become a random token, and 10 % stay.

It neither starts from Megatron's checkpoints nor writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.training.arguments import (
    ModelArguments,
    TokenizerArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.evaluation import count_samples, evaluate, evaluation_loader
from wavemare.training.models import make_masked_model, max_positions
from wavemare.training.run import disconnect, start_run
from wavemare.training.samples import fill_gap
from wavemare.training.text import read_text

MODEL = str(Path(__file__).with_name("model.json"))


@dataclass(frozen=True)
class PretrainArguments(TokenizerArguments, ModelArguments, TrainArguments):
    """Options of BERT pretraining, beside those of all recipes (``--data``, ``--set``, ...)."""

    output: str = option("runs/bert-pretrain", "run folder")
    model_config: str = option(MODEL, "transformers configuration of the model")
    mask_probability: float = option(0.15, "share of tokens to guess")
    prompt: str = option("def [MASK](self):", "text with a [MASK] to fill in at the end")


def main() -> None:
    """Pretrain, evaluate, export and fill a gap."""
    # Arguments. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(PretrainArguments)
    run = start_run(args)  # checks JSON, data, model; makes the run folder; joins the process group

    # Data. One process of each host tokenizes it; the others read the tokens from the cache.
    text = read_text(run.source, args, special_tokens="bert")
    train_samples, validation = text.masked_samples(
        args.sequence_length, probability=args.mask_probability, seed=args.seed
    )

    # Model, new and whole on every process.
    model = make_masked_model(args, text, run.tensor_parallel)
    check_gap(text.tokenizer, args.prompt, max_positions(model.config))
    run.wait_for_all()  # a host may read its data for hours
    run.show("BERT pretraining", model, text.describe())  # prints what is trained, and how
    run.balance(model)  # with --balance: writes the devices' shares into run.config

    # Engine. pretrain.json decides: two stages with 1F1B, 32 samples in a step, and AdamW, whose
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
                run.log_eval(step, eval_loss=evaluate(engine, eval_loader))
            if step % args.save_interval == 0 or run.is_last:  # SIGTERM makes a step the last
                run.save_checkpoint(engine, train_loader)

    # Final evaluation, on more samples; export; what the model puts into a gap.
    if not run.stopped:  # by SIGTERM
        engine.synchronize()  # all ranks take one version: with local steps, the mean of replicas
        eval_loss = evaluate(engine, final_loader)
        run.log_eval(args.max_steps, eval_loss=eval_loss)
        wavemare.save_pretrained(engine, run.model_folder, tokenizer=text.tokenizer)
        if run.rank == 0:
            sample = fill_gap(run.model_folder, args.prompt)
            print(f"\nThe model in {run.model_folder} fills in:\n{sample}\n", flush=True)
        results = {"eval_loss": eval_loss, **count_samples(engine, final_loader, validation)}
        # The loss to compare with, of unigrams, is counted last: the model is saved by then.
        run.finish(results, lambda: text.unigram_baselines(args.sequence_length))
    disconnect()


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
