# SPDX-License-Identifier: Apache-2.0
"""Continue training a causal language model from a Hugging Face folder.

::

    wavemare train gpt/finetune -- --model runs/gpt-pretrain/model --data 'notes/*.txt'

Differs from ``gpt/pretrain.py`` in:

* the start: model and tokenizer come from a folder, ``--model``, or from Megatron's checkpoint,
  ``--load``. Nothing is made new;
* the length: there are fewer steps, and more evaluations;
* ``finetune.json``: two stages with 1F1B, and AdamW at 3e-4. ``--set`` changes it.

It trains all weights, on every token of the text. ``llama/sft.py`` has LoRA, and trains answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.failure import run_main
from wavemare.training.arguments import TokenizerArguments, TrainArguments, option, parse_arguments
from wavemare.training.evaluation import count_samples, evaluate, evaluation_loader
from wavemare.training.models import export, load_causal_model
from wavemare.training.run import disconnect, start_run
from wavemare.training.samples import continue_text
from wavemare.training.text import read_text


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
    # Arguments. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(FinetuneArguments)
    run = start_run(args)  # checks JSON, data, model; makes the run folder; joins the process group

    # Data, in the tokens of the model. One process of each host tokenizes it.
    text = read_text(run.source, args)
    train_samples, validation = text.causal_samples(
        args.sequence_length, num_samples=run.num_samples, seed=args.seed
    )

    # Model. Each process reads its part of the weights.
    model = load_causal_model(args)
    text.check_fits(args.sequence_length, model.config)
    prompt = text.choose_prompt(args.prompt, model.config)  # of the sample at the end
    run.wait_for_all()  # a host may read its data for hours
    run.show("GPT fine-tuning", model, text.describe())  # prints what is trained, and how
    run.balance(model)  # with --balance: writes the devices' shares into run.config

    # Engine. finetune.json decides: two stages with 1F1B, 16 samples in a step, and AdamW, whose
    # rate rises to 3e-4 and falls to a tenth.
    engine, *_ = wavemare.initialize(model=model, config=run.config)

    # Each replica reads its own samples. Megatron's are shuffled already.
    train_loader = ResumableLoader.of(engine, train_samples, seed=args.seed, shuffle=text.shuffles)
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

    # Final evaluation, on more samples; export; a sample of what the model writes.
    if not run.stopped:  # by SIGTERM
        engine.synchronize()  # all ranks take one version: with local steps, the mean of replicas
        eval_loss = evaluate(engine, final_loader)
        run.log_eval(args.max_steps, eval_loss=eval_loss)
        export(args, engine, run.model_folder, text.tokenizer)
        if run.rank == 0:
            sample = continue_text(run.model_folder, prompt, args.seed)
            print(f"\nThe model in {run.model_folder} writes:\n{sample}\n", flush=True)
        results = {"eval_loss": eval_loss, **count_samples(engine, final_loader, validation)}
        # The losses to compare with, of n-grams, are counted last: the model is saved by then.
        run.finish(results, lambda: text.baselines(args.sequence_length, run.final_samples))
    disconnect()


if __name__ == "__main__":
    run_main(main)
