# SPDX-License-Identifier: Apache-2.0
"""Tune a causal language model by preferences (DPO): chosen answers over rejected ones.

By default the model of ``wavemare train llama/sft`` learns to tell the description of a function
from another one's. With a model and rows of one's own (``prompt``, ``chosen`` and ``rejected``),
and with LoRA::

    hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M
    wavemare train llama/dpo -- --model SmolLM2-135M --data pairs.jsonl --lora_r 16

Differs from ``llama/sft.py`` in:

* the data: pairs of rows, each with one prompt and one answer. They are not packed;
* the loss: `dpo_loss`, of the `log_probabilities` of both answers. Rewards are recorded beside it,
  under TRL's names.

Differs from the paper (Rafailov et al., 2023) in:

* the reference: it says once, before the first step, how probable each answer is. It is the model
  before it is trained, which is the base without the adapter, or that of ``--reference``. Dropout
  is off, as it is in the reference;
* ``dpo.json``: AdamW in place of RMSprop, and 16 pairs in a step in place of 64.

It has no other loss of preferences (IPO, KTO), no label smoothing, and draws no answers itself.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.failure import run_main
from wavemare.observe import print_rank_0
from wavemare.training.arguments import ChatArguments, option, parse_arguments
from wavemare.training.evaluation import evaluate, evaluation_loader, keep_best, read_best
from wavemare.training.models import export
from wavemare.training.preferences import (
    check_preferences,
    inputs_of_pairs,
    load_pair_model,
    read_pairs,
    use_pair_loss,
)
from wavemare.training.run import disconnect, start_run
from wavemare.training.samples import continue_text

if TYPE_CHECKING:
    from torch import Tensor

    from wavemare.hf.preferences import PreferenceLoss

IGNORED = -100  # the label of a token that has no loss, as in transformers


@dataclass(frozen=True)
class DpoArguments(ChatArguments):
    """Options of preference tuning, beside those of all recipes (``--data``, ``--set``, ...)."""

    megatron_checkpoints: ClassVar[bool] = True  # --load may name one; --save-megatron writes one
    rows_per_sample: ClassVar[int] = 2  # a sample is a pair

    output: str = option("runs/llama-dpo", "run folder")
    model: str = option("runs/llama-sft/model", "Hugging Face folder of model and tokenizer")
    reference: str | None = option(None, "folder of another reference; --model if omitted")
    beta: float = option(0.1, "how much it costs to leave the reference")
    sequence_length: int = option(256, "tokens of a prompt with one answer")
    max_steps: int = option(100, "optimizer steps")
    eval_interval: int = option(50, "steps between evaluations; the best one's model is exported")
    save_interval: int = option(50, "steps between checkpoints")


def main() -> None:
    """Load, format, ask the reference, train, evaluate, export and answer."""
    # Arguments. Most mistakes end the run here, before torch is imported.
    args = parse_arguments(DpoArguments)
    check_preferences(args)
    rate = 1e-6 if args.lora_r is None else 1e-5  # for "lr": "auto" in the JSON
    # Checks the JSON, makes the run folder, and joins the process group. On GPUs it is bf16. The
    # inputs travel between stages, if there are any.
    run = start_run(args, lr=rate, inputs=inputs_of_pairs(args), bf16=True)

    # Model and data. Each process reads its part of the weights; one of each host formats pairs.
    tokenizer, model = load_pair_model(args)  # without dropout
    pairs = read_pairs(run.source, args, tokenizer)
    run.wait_for_all()  # a host may read its data for hours
    run.show("preference tuning", model, pairs.describe())  # prints what is trained, and how
    print_rank_0(pairs.preview())

    # Engine. dpo.json decides: data parallelism with ZeRO 1, and AdamW. Its loss is dpo_loss.
    # The reference says once, before the first step, how probable each answer is. A run that
    # resumes has this in reference.npz. The model of --reference answers in an engine of its own,
    # which is freed first. Otherwise, the model itself answers.
    initialize = partial(initialize_with_pair_loss, config=run.config, beta=args.beta)
    is_known = pairs.load_reference(run)
    if not is_known and args.reference is not None:
        pairs.ask_other_model(run, initialize)
    engine, pair_loss = initialize(model)
    if not is_known and args.reference is None:
        pairs.ask_reference(run, pair_loss)

    # Each replica reads its own pairs, with what the reference says of them.
    train_loader = ResumableLoader.of(engine, pairs.train, seed=args.seed)
    train_batches = pair_loss.batches(train_loader)  # two rows for each pair
    eval_loader = evaluation_loader(engine, pairs.validation, run.eval_samples)

    def evaluate_and_keep(step: int, best: dict[str, Any]) -> dict[str, Any]:
        """Evaluate, export the model if it is the best one, and return the best evaluation."""
        engine.synchronize()  # all ranks take one version: with local steps, the mean of replicas
        eval_loss = evaluate(engine, [*pair_loss.batches(eval_loader)])
        run.log_eval(step, eval_loss=eval_loss, **pair_loss.take_rewards(training=False))
        if not best or eval_loss < best["eval_loss"]:
            export(args, engine, run.model_folder, pairs.tokenizer, merge=args.merge)
            best = keep_best(run, step, eval_loss)
        return best

    # Start. With --resume, engine and loader take the newest checkpoint.
    best = read_best(run)  # step and eval_loss of the best evaluation before; or empty
    first = run.resume_or_start(engine, train_loader)

    # Loop.
    with run.recording(engine):  # metrics and progress; in here, SIGTERM only sets a flag
        for step in run.steps(first):  # to --max_steps; SIGTERM ends all ranks after the same step
            # One optimizer step: forward and backward of each micro-batch, then the update.
            loss = engine.train_batch(train_batches)  # a tensor: the mean over pairs
            run.record(step, loss, pair_loss.take_rewards)  # a line of metrics has the rewards, too
            if step % args.eval_interval == 0 and step < args.max_steps:  # the final one is below
                best = evaluate_and_keep(step, best)
            # After the evaluation: a run that resumes here evaluates later steps only.
            if step % args.save_interval == 0 or run.is_last:  # SIGTERM makes a step the last
                run.save_checkpoint(engine, train_loader)

    # Final evaluation, and an answer of the exported model, which is that of the best evaluation.
    if not run.stopped:  # by SIGTERM
        best = evaluate_and_keep(args.max_steps, best)
        if run.rank == 0:
            answer = continue_text(run.model_folder, pairs.question(), args.seed)
            print(f"\nThe model in {run.model_folder} answers:\n{answer}\n", flush=True)
        results = {"eval_loss": best["eval_loss"], "best step": best["step"]}
        run.finish(results)
    disconnect()


def initialize_with_pair_loss(
    model: Any, config: dict[str, Any], beta: float
) -> tuple[Any, PreferenceLoss]:
    """Return the engine of a model, and its loss: log_probabilities, and dpo_loss of them."""
    engine, *_ = wavemare.initialize(model=model, config=copy.deepcopy(config))
    return engine, use_pair_loss(engine, log_probabilities, partial(dpo_loss, beta=beta))


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how probable each row's answer is, as a logarithm, in fp32, (rows,).

    Args:
        logits: (rows, sequence, vocabulary).
        labels: (rows, sequence): the tokens of the answer, and `IGNORED` elsewhere.
    """
    from torch.nn.functional import cross_entropy

    following = labels[:, 1:]  # the logits of a token predict the next one
    in_answer = following != IGNORED
    predictions = logits[:, :-1][in_answer].float()
    losses = cross_entropy(predictions, following[in_answer], reduction="none")
    zeros = losses.new_zeros(following.shape)
    return zeros.masked_scatter(in_answer, -losses).sum(-1)


def dpo_loss(log_probs: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the mean loss of pairs, and the rewards of their answers, (pairs, 2).

    Args:
        log_probs: Of the chosen and the rejected answers by the model, (pairs, 2).
        reference: The same by the reference.
        beta: How much it costs to leave the reference.
    """
    from torch.nn.functional import logsigmoid

    rewards = beta * (log_probs - reference)
    margins = rewards[:, 0] - rewards[:, 1]  # how much more probable the chosen answer became
    return -logsigmoid(margins).mean(), rewards


if __name__ == "__main__":
    run_main(main)
