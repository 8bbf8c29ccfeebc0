# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model on chats, or on prompts with their completions.

By default the model of ``wavemare train llama`` learns to describe functions. With a model and rows
of one's own (``messages``, ``prompt`` and ``completion``, or ``text``), and with LoRA::

    hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M
    wavemare train llama/sft -- --model SmolLM2-135M --data chats.jsonl --lora_r 16

Differs from ``gpt/pretrain.py`` in:

* the data: rows that are packed into samples, and do not see each other. Only what the assistant
  says is trained: `label_answers`;
* the loss: the mean over all trained tokens of a step, however the micro-batches share them;
* the start: model and tokenizer come from a folder, with LoRA's layers if ``--lora_r`` is given;
* the end: the model of the best evaluation is exported, and answers a question;
* ``sft.json``: a whole model on each GPU, AdamW. ``--set`` changes it.

It does not weigh rows or turns: each trained token counts once. ``--balance`` is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.failure import run_main
from wavemare.observe import print_rank_0
from wavemare.training.arguments import ChatArguments, option, parse_arguments
from wavemare.training.chats import check_chat_options, read_chats, use_token_mean
from wavemare.training.evaluation import evaluate, keep_best, read_best
from wavemare.training.models import export, load_chat_model
from wavemare.training.run import disconnect, start_run
from wavemare.training.samples import continue_text

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # the label of a token that has no loss, as in transformers


@dataclass(frozen=True)
class SftArguments(ChatArguments):
    """Options of fine-tuning, beside those of all recipes (``--data``, ``--set``, ...)."""

    megatron_checkpoints: ClassVar[bool] = True  # --load may name one; --save-megatron writes one

    output: str = option("runs/llama-sft", "run folder")
    model: str = option("runs/llama-pretrain/model", "Hugging Face folder of model and tokenizer")
    sequence_length: int = option(256, "tokens per sample")
    max_steps: int = option(100, "optimizer steps")
    eval_interval: int = option(50, "steps between evaluations; the best one's model is exported")
    save_interval: int = option(50, "steps between checkpoints")
    no_packing: bool = option(False, "one row per sample")


def main() -> None:
    """Load, format, train, evaluate, export and answer."""
    # Arguments. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(SftArguments)
    check_chat_options(args)
    rate = 2e-5 if args.lora_r is None else 2e-4  # for "lr": "auto" in the JSON
    inputs = ["input_ids"] if args.no_packing else ["input_ids", "position_ids"]
    # Checks JSON, data and model, makes the run folder, and joins the process group. On GPUs it is
    # bf16. The inputs travel between stages, if there are any.
    run = start_run(args, lr=rate, inputs=inputs, bf16=True)

    # Model and data. Each process reads its own part of the weights, and one process of each host
    # formats the chats.
    tokenizer, model = load_chat_model(args, packs=not args.no_packing)
    chats = read_chats(run.source, args, tokenizer)
    run.wait_for_all()  # a host may read its data for hours
    run.show("supervised fine-tuning", model, chats.describe())  # prints what is trained, and how
    print_rank_0(chats.preview())

    # Engine. sft.json decides: data parallelism with ZeRO 1, 16 samples in a step, and AdamW.
    engine, *_ = wavemare.initialize(model=model, config=run.config)
    # transformers' loss is the mean over a micro-batch. Here, each trained token of a step counts
    # the same. So the loss of a micro-batch is multiplied by its number of labels, and divided by
    # the mean number of labels of the step's micro-batches.
    answer_loss = use_token_mean(engine)

    # Each replica reads its own samples.
    train_loader = ResumableLoader.of(engine, chats.train, seed=args.seed)
    train_batches = answer_loss.weigh_steps(label_answers(train_loader))
    eval_loader = chats.evaluation_loader(engine, run.eval_samples)  # packed, too

    def evaluate_and_keep(step: int, best: dict[str, Any]) -> dict[str, Any]:
        """Evaluate, export the model if it is the best one, and return the best evaluation."""
        engine.synchronize()  # all ranks take one version: with local steps, the mean of replicas
        eval_loss = evaluate(engine, answer_loss.weigh(label_answers(eval_loader)))
        run.log_eval(step, eval_loss=eval_loss)
        if not best or eval_loss < best["eval_loss"]:
            export(args, engine, run.model_folder, chats.tokenizer, merge=args.merge)
            best = keep_best(run, step, eval_loss)
        return best

    # Start. Dropout gets its seed. With --resume, engine and loader take the newest checkpoint.
    best = read_best(run)  # step and eval_loss of the best evaluation before; or empty
    first = run.resume_or_start(engine, train_loader)

    # Loop.
    with run.recording(engine):  # metrics and progress; in here, SIGTERM only sets a flag
        for step in run.steps(first):  # to --max_steps; SIGTERM ends all ranks after the same step
            # One optimizer step: forward and backward of each micro-batch, then the update.
            loss = engine.train_batch(train_batches)  # a tensor: the mean over trained tokens
            run.record(step, loss)  # shows it; every --log_interval steps, writes a line of metrics
            if step % args.eval_interval == 0 and step < args.max_steps:  # the final one is below
                best = evaluate_and_keep(step, best)
            # After the evaluation: a run that resumes here evaluates later steps only.
            if step % args.save_interval == 0 or run.is_last:  # SIGTERM makes a step the last
                run.save_checkpoint(engine, train_loader)

    # Final evaluation, and an answer of the exported model, which is that of the best evaluation.
    if not run.stopped:  # by SIGTERM
        best = evaluate_and_keep(args.max_steps, best)
        if run.rank == 0:
            answer = continue_text(run.model_folder, chats.question(), args.seed)
            print(f"\nThe model in {run.model_folder} answers:\n{answer}\n", flush=True)
        results = {"eval_loss": best["eval_loss"], "best step": best["step"]}
        run.finish(results)
    disconnect()


def label_answers(batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches with ``labels``, (samples, sequence_length); the model shifts them.

    ``trained``, of the same shape, is true where the assistant speaks, up to the end of its turn.
    All other tokens are only read.
    """
    for batch in batches:
        inputs = {name: values for name, values in batch.items() if name != "trained"}
        labels = batch["input_ids"].masked_fill(~batch["trained"], IGNORED)
        yield {**inputs, "labels": labels}


if __name__ == "__main__":
    run_main(main)
