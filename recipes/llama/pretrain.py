# SPDX-License-Identifier: Apache-2.0
"""Pretrain a Llama on text, from the text to a model that writes.

::

    wavemare train llama
    wavemare train llama -- --model_config recipes/llama/model_135m.json --vocab_size 49152

Differs from ``gpt/pretrain.py`` in:

* the model: RMSNorm, rotary positions, grouped-query attention, and experts with
  ``model_experts.json``. On GPUs it computes in bf16;
* the learning rate: it warms up, stays, and decays over the last fifth of the steps. DeepSpeed's
  JSON has no such scheduler, so `warmup_stable_decay` makes it;
* ``pretrain.json``: two asynchronous stages as there, but with AdamW, and synchronous first steps.
  ``--set`` changes it.

Differs from Meta's Llama in the size, the rate (Llama's falls by a cosine), the tokenizer (a
byte-level BPE of the text), and the head: in ``model.json`` it shares its weight with the
embedding. PipeMare unties the two, and trains a copy of each; synchronous schedules do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

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
    """Options of Llama pretraining, beside those of all recipes (``--data``, ``--set``, ...)."""

    megatron_checkpoints: ClassVar[bool] = True  # --load may name one; --save-megatron writes one

    output: str = option("runs/llama-pretrain", "run folder")
    model_config: str = option(MODEL, "transformers configuration of the model")
    max_steps: int = option(200, "optimizer steps")
    save_interval: int = option(100, "steps between checkpoints")
    prompt: str | None = option(None, "start of the sample text; by default a validation text's")


def main() -> None:
    """Pretrain, evaluate, export and sample."""
    # Arguments. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(PretrainArguments)
    # Checks JSON, data and model, makes the run folder, and joins the process group.
    run = start_run(args, bf16=True)  # bf16 on GPUs

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
    run.show("Llama pretraining", model, text.describe(), "warm-up, constant, decay")
    run.balance(model)  # with --balance: writes the devices' shares into run.config

    # Engine. pretrain.json decides: two stages with PipeMare, synchronous at first, and AdamW at
    # 2e-3. If the JSON has a scheduler, it is used; else warmup_stable_decay.
    scheduler = None if "scheduler" in run.config else warmup_stable_decay(args.max_steps)
    engine, *_ = wavemare.initialize(model=model, config=run.config, lr_scheduler=scheduler)

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


def warmup_stable_decay(steps: int) -> Callable[[Any], Any]:
    """Return a function from optimizer to scheduler: a tenth warms up, the last fifth decays."""
    from transformers import get_wsd_schedule

    warmup, decay = max(steps // 10, 1), steps // 5
    return partial(
        get_wsd_schedule,
        num_warmup_steps=warmup,
        num_decay_steps=decay,
        num_stable_steps=max(steps - warmup - decay, 0),
        decay_type="linear",
    )


if __name__ == "__main__":
    run_main(main)
