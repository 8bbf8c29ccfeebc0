# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT-2 on text, from the text to a model that writes.

Run it with ``wavemare train gpt``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.gpt.pretrain \
        --deepspeed_config recipes/gpt/pretrain.json

`main` goes through arguments, data, model, engine, loop, evaluation and sample. Read ``minimal.py``
first: it does the same on one page, without options and checkpoints. Each other recipe is this file
with differences, which it lists first.

Differs from the GPT-2 paper in:

* the text: Python's standard library, unless ``--data`` names another one;
* the size: ``model.json`` has 4 layers of width 192, without dropout, and a new tokenizer has 4,096
  tokens. So two CPU cores train it in minutes;
* the optimizer: ``pretrain.json`` has two stages with PipeMare, whose gradients are one step old.
  ``optimizer_policy: auto`` then takes Muon in place of Adam for the hidden matrices. AdamW still
  steps embedding, head, biases and norms.

``--set`` changes the JSON: with ``--set wavemare.pipeline.schedule=auto`` the pipeline is
synchronous, and AdamW steps all weights. docs/recipes.md has the words for ZeRO, waves, sparse
gradients and slow links.

It does not keep the best model: the last one is exported. It computes in fp32, unless the JSON says
``"bf16"``. ZeRO 2 and 3 need a run without stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.failure import run_main
from wavemare.training.arguments import (
    ModelArguments,
    TokenizerArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.evaluation import count_samples, evaluate, evaluation_loader
from wavemare.training.models import export, make_or_load_model
from wavemare.training.run import disconnect, start_run
from wavemare.training.samples import continue_text
from wavemare.training.text import read_text

MODEL = str(Path(__file__).with_name("model.json"))


@dataclass(frozen=True)
class PretrainArguments(TokenizerArguments, ModelArguments, TrainArguments):
    """Options of GPT pretraining, beside those of all recipes (``--data``, ``--set``, ...)."""

    megatron_checkpoints: ClassVar[bool] = True  # --load may name one; --save-megatron writes one

    output: str = option("runs/gpt-pretrain", "run folder")
    model_config: str = option(MODEL, "transformers configuration of the model")
    max_steps: int = option(250, "optimizer steps")
    save_interval: int = option(250, "steps between checkpoints")
    prompt: str | None = option(None, "start of the sample text; by default a validation text's")


def main() -> None:
    """Pretrain, evaluate, export and sample."""
    # Arguments. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(PretrainArguments)
    run = start_run(args)  # checks JSON, data, model; makes the run folder; joins the process group

    # Data. One process of each host tokenizes it; the others read the tokens from the cache.
    text = read_text(run.source, args, special_tokens="gpt")
    # A sample is {"input_ids", "labels"}, each [sequence_length]; the model shifts the labels.
    train_samples, validation = text.causal_samples(
        args.sequence_length, num_samples=run.num_samples, seed=args.seed
    )

    # Model. A new one is made whole on every process. From --load, each process reads its part.
    model = make_or_load_model(args, text, run.tensor_parallel, resume=run.resume)
    prompt = text.choose_prompt(args.prompt, model.config)  # of the sample at the end
    run.wait_for_all()  # a host may read its data for hours
    run.show("GPT pretraining", model, text.describe())  # prints what is trained, and how
    run.balance(model)  # with --balance: writes the devices' shares into run.config

    # Engine. pretrain.json decides: two stages with PipeMare, 16 samples in a step, Muon for the
    # matrices and AdamW for the rest; the rate rises to 4e-3 and falls to a tenth, by a cosine.
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
