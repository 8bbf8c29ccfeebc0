# SPDX-License-Identifier: Apache-2.0
"""Continue training a causal language model from a Hugging Face folder.

::

    wavemare train gpt/finetune -- --model runs/gpt-pretrain/model --data 'notes/*.txt'

Differs from ``gpt/pretrain.py`` in:

* the start: model and tokenizer come from a folder, ``--model``;
* ``finetune.json``: two stages with 1F1B, AdamW at a lower rate. ``--set`` changes it;
* fewer steps, and more evaluations.

It trains all weights, on every token of the text. ``llama/sft.py`` has LoRA, and trains answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.failure import run_main
from wavemare.training.arguments import TokenizerArguments, TrainArguments, option, parse_arguments
from wavemare.training.balance import balance
from wavemare.training.evaluation import count_samples, evaluate, evaluation_loader
from wavemare.training.models import check_model, export, make_or_load_model
from wavemare.training.run import TrainingRun
from wavemare.training.samples import continue_text
from wavemare.training.setup import (
    disconnect,
    join_and_seed,
    read_setup,
    seed_dropout,
    wait_for_data,
)
from wavemare.training.start import count_parameters, print_layout, print_start
from wavemare.training.text import find_data, read_text


@dataclass(frozen=True)
class FinetuneArguments(TokenizerArguments, TrainArguments):
    """Options of GPT fine-tuning, beside those of all recipes (``--data``, ``--set``, ...)."""

    megatron_checkpoints: ClassVar[bool] = True  # --load may name one; --save-megatron writes one

    output: str = option("runs/gpt-finetune", "run folder")
    model: str = option(
        "runs/gpt-pretrain/model", "Hugging Face folder of the model and its tokenizer"
    )
    max_steps: int = option(100, "optimizer steps")
    eval_interval: int = option(50, "steps between evaluations")
    save_interval: int = option(50, "steps between checkpoints")
    prompt: str | None = option(None, "start of the sample text; by default a validation text's")


def main() -> None:
    """Load, train, evaluate, export and sample."""
    # Arguments and configuration. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(FinetuneArguments)
    setup = read_setup(args)  # the JSON with --set; each "auto" in its scheduler is now a number
    source = find_data(args)
    check_model(args)
    run = TrainingRun(args)  # makes the run folder, which records warnings from now on

    # Data. One process of each host tokenizes it; the others read the tokens from the cache.
    join_and_seed(setup)  # the other processes; the seed gives all the same first weights
    text = read_text(source, args, special_tokens="gpt")
    # A sample is {"input_ids", "labels"}, each [sequence_length]; the model shifts the labels.
    train_samples, validation = text.causal_samples(
        args.sequence_length, num_samples=setup.num_samples, seed=args.seed
    )
    wait_for_data(setup)  # until all hosts have read, however long that takes

    # Model. Each process reads its own part of the weights.
    model = make_or_load_model(args, text, setup.tensor_parallel)
    prompt = text.choose_prompt(args.prompt, model.config)  # of the sample at the end
    print_start("GPT fine-tuning", setup, model, text.describe())

    # Engine. finetune.json decides: two stages with 1F1B, 16 samples in a step, and AdamW, whose
    # rate rises to 3e-4 and falls to a tenth.
    balance(setup, model)  # with --balance, changes setup.config: faster devices get more work
    engine, *_ = wavemare.initialize(model=model, config=setup.config)
    print_layout(setup, engine)
    seed_dropout(engine, args.seed)  # other numbers in each replica; --resume loads the state

    # Each replica reads its own samples.
    train_loader = ResumableLoader.of(engine, train_samples, seed=args.seed, shuffle=text.shuffles)
    eval_loader = evaluation_loader(engine, validation, setup.eval_samples)  # few, between steps
    final_loader = evaluation_loader(engine, validation, setup.final_samples)  # more, at the end

    # Loop. With --resume, it goes on from the newest checkpoint.
    with run.training(setup, engine, train_loader) as steps:
        for step in steps:  # to --max_steps; SIGTERM ends all processes after the same step
            # One optimizer step: forward and backward of each micro-batch, then the update.
            loss = engine.train_batch(train_loader)  # a tensor: the mean of the step
            run.after_step(loss)  # shows it; every --log_interval steps, writes a line of metrics
            if step % args.eval_interval == 0 and not run.is_last:  # the last one follows below
                run.log_eval(eval_loss=evaluate(engine, eval_loader))
            run.save_if_due()  # every --save_interval steps, and after the last one

    # Evaluation, export, and a sample of what the model writes.
    if not run.stopped:
        engine.synchronize()  # now all ranks have one version of the weights
        eval_loss = evaluate(engine, final_loader)
        run.log_eval(eval_loss=eval_loss)
        export(args, engine, setup.model_folder, text.tokenizer)
        if setup.rank == 0:
            sample = continue_text(setup.model_folder, prompt, args.seed)
            print(f"\nThe model in {setup.model_folder} writes:\n{sample}\n", flush=True)
        results = {"eval_loss": eval_loss, **count_samples(engine, final_loader, validation)}
        results["parameters"] = count_parameters(setup, model)
        # The losses to compare with, of n-grams, are counted last: the model is saved by then.
        run.finish(results, lambda: text.baselines(args.sequence_length, setup.final_samples))
    disconnect()


if __name__ == "__main__":
    run_main(main)
