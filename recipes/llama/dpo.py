# SPDX-License-Identifier: Apache-2.0
"""Tune a causal language model by preferences (DPO): chosen answers over rejected ones.

By default the model of ``wavemare train llama/sft`` learns to tell the description of a function
from another one's. With a model and rows of one's own (``prompt``, ``chosen`` and ``rejected``),
and with LoRA::

    wavemare train llama/dpo -- --model SmolLM2-135M --data pairs.jsonl --lora_r 16

Differs from ``llama/sft.py`` in:

* the data: pairs of rows, each with one prompt and one answer. They are not packed;
* the reference: the model before it is trained, which is the base without the adapter, or that of
  ``--reference``. It says once, before the first step, how probable each answer is;
* the loss: DPO's, with TRL's figures beside it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.engine import Interruption
from wavemare.failure import run_main
from wavemare.observe import print_rank_0
from wavemare.training.arguments import TokenizerArguments, TrainArguments, option, parse_arguments
from wavemare.training.chats import check_chat_options
from wavemare.training.checkpoints import load_checkpoint, save_checkpoint
from wavemare.training.evaluation import evaluate, keep_best, read_best
from wavemare.training.models import check_model, export
from wavemare.training.preferences import (
    check_preferences,
    load_pair_model,
    read_pairs,
    use_preferences,
)
from wavemare.training.samples import continue_text
from wavemare.training.setup import (
    Setup,
    disconnect,
    join_and_seed,
    prefer_bf16,
    read_setup,
    wait_for_data,
)
from wavemare.training.start import count_parameters, print_layout, print_start, start_recording
from wavemare.training.text import find_data


@dataclass(frozen=True)
class DpoArguments(TokenizerArguments, TrainArguments):
    """Options of preference tuning, beside those of all recipes (``--data``, ``--set``, ...)."""

    megatron_checkpoints: ClassVar[bool] = True  # --load may name one; --save-megatron writes one
    no_packing: ClassVar[bool] = True
    rows_per_sample: ClassVar[int] = 2

    output: str = option("runs/llama-dpo", "run folder")
    model: str = option("runs/llama-sft/model", "Hugging Face folder of model and tokenizer")
    reference: str | None = option(None, "folder of another reference; --model if omitted")
    beta: float = option(0.1, "how much it costs to leave the reference")
    sequence_length: int = option(256, "tokens of a prompt with one answer")
    max_steps: int = option(100, "optimizer steps")
    eval_interval: int = option(50, "steps between evaluations; the best one's model is exported")
    save_interval: int = option(50, "steps between checkpoints")
    long_rows: str = option("cut", "what becomes of too long rows: cut, or skip to leave them out")
    chat_template: str | None = option(None, "file in place of the tokenizer's chat template")
    chat_template_kwargs: str | None = option(None, "JSON that the template is given")
    lora_r: int | None = option(None, "rank of LoRA; all weights are trained if omitted")
    lora_alpha: int = option(32, "LoRA's alpha: adapters are scaled by alpha / rank")
    lora_targets: str = option("all-linear", "names of the adapted layers, with commas between")
    merge: bool = option(False, "export a full model, with LoRA's weights merged")


def main() -> None:
    """Load, format, ask the reference, train, evaluate, export and answer."""
    # Options and configuration. Most mistakes are refused here, before torch is imported.
    args = parse_arguments(DpoArguments)
    check_chat_options(args)
    setup = read_setup(args)  # the JSON with --set; each "auto" in its scheduler is now a number
    source = find_data(args)
    check_model(args)
    check_preferences(args)
    recording = start_recording(args)  # the run folder: metrics, results, and warnings from now on

    # Model and pairs. Each process reads its part of the weights; one of each host formats pairs.
    join_and_seed(setup)  # the other processes; the weights are drawn alike on all of them
    setup = prefer_bf16(setup)  # on GPUs, unless the JSON names a 16-bit type
    tokenizer, model = load_pair_model(args)  # without dropout
    setup = fill_in_auto(setup, args, model)  # "lr": "auto", and what travels between stages
    pairs = read_pairs(source, args, tokenizer)
    wait_for_data(setup)  # a collective would time out while one host still reads
    print_start("preference tuning", setup, model, pairs.describe())
    print_rank_0(pairs.preview())

    # Engine. The JSON decides the layout and the optimizer. Before the first step its model is the
    # reference, unless --reference names another one, which gets an engine of its own for a while.
    known = pairs.recall_reference(setup) or pairs.refer_to_other(setup)
    engine, *_ = wavemare.initialize(model=model, config=setup.config)
    print_layout(setup, engine)
    preferences = use_preferences(engine, args.beta)  # its loss is DPO's from now on
    if not known:
        pairs.refer_to(preferences, setup)

    # Batches from the start, or from the newest checkpoint, with the training time before it.
    train_loader = ResumableLoader.of(engine, pairs.train, seed=args.seed)
    train_batches = preferences.batches(train_loader)  # two rows for each pair
    eval_loader = pairs.evaluation_loader(engine, setup.eval_samples)
    earlier_seconds = load_checkpoint(setup, engine, train_loader) if setup.resume else 0.0
    best = read_best(setup)  # step and loss of the evaluation whose model was exported; or empty

    # Training, until the last step or SIGTERM. The model of the best evaluation is exported.
    tokens_per_step = engine.train_batch_size() * args.rows_per_sample * args.sequence_length
    losses: list[Any] = []  # since the last line of the log
    stopped = False
    with (
        recording.training(engine, tokens=tokens_per_step, seconds=earlier_seconds),
        Interruption.of(engine) as interruption,
    ):
        for step in range(engine.global_steps + 1, args.max_steps + 1):
            with recording.step(step):
                # One optimizer step: forward and backward of each micro-batch, then the update.
                loss = engine.train_batch(train_batches)  # a tensor: the mean over pairs
            losses.append(loss)
            stopped = step < args.max_steps and interruption.stops_after(step)  # by SIGTERM
            is_last = stopped or step == args.max_steps
            if is_last or step % args.log_interval == 0:
                figures = preferences.take_figures()  # rewards and margins, waits for the device
                recording.log(step, loss=float(sum(losses) / len(losses)), **figures)
                losses.clear()

            if step == args.max_steps or step % args.eval_interval == 0:
                with recording.paused():  # its time is not in tokens per second
                    engine.synchronize()  # one version of the weights on all ranks
                    eval_loss = evaluate(engine, [*preferences.batches(eval_loader)])
                    rewards = preferences.take_figures(training=False)
                    recording.log_eval(step, eval_loss=eval_loss, **rewards)
                    if not best or eval_loss < best["eval_loss"]:
                        export(args, engine, setup.model_folder, tokenizer, merge=args.merge)
                        best = keep_best(setup, step, eval_loss)

            # After the evaluation: a run that resumes here evaluates later steps only.
            if is_last or step % args.save_interval == 0:
                save_checkpoint(setup, engine, train_loader, recording)
            if stopped:
                recording.stopped(step)
                break
        engine.finish_saving()  # waits for a checkpoint that is written in the background

    # An answer of the exported model.
    if not stopped:
        if setup.rank == 0:
            answer = continue_text(setup.model_folder, pairs.question(), args.seed)
            print(f"\nThe model in {setup.model_folder} answers:\n{answer}\n", flush=True)
        results = {"eval_loss": best["eval_loss"], "best step": best["step"]}
        recording.finish(results | {"parameters": count_parameters(setup, model)})
    disconnect()


def fill_in_auto(setup: Setup, args: DpoArguments, model: Any) -> Setup:
    """Return the setup with a learning rate, and with what travels through a pipeline."""
    from wavemare.hf.preferences import inputs_of

    config = copy.deepcopy(setup.config)
    rates = config.get("optimizer", {}).get("params", {})
    if rates.get("lr") == "auto":
        rates["lr"] = 1e-6 if args.lora_r is None else 1e-5
    pipeline = config.get("wavemare", {}).get("pipeline")
    if pipeline is not None:
        pipeline["inputs"] = list(inputs_of(model.config))
    return replace(setup, config=config)


if __name__ == "__main__":
    run_main(main)
