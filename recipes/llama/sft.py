# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model on chats, or on prompts with their completions.

By default the model of ``wavemare train llama`` learns to describe functions. With a model and rows
of one's own (``messages``, ``prompt`` and ``completion``, or ``text``), and with LoRA::

    wavemare train llama/sft -- --model SmolLM2-135M --data chats.jsonl --lora-r 16

Only what the assistant says is trained. Rows are packed, and do not see each other. The loss is the
mean over all trained tokens of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.data.sources import resolve
from wavemare.errors import ConfigError, ModelError
from wavemare.extras import require
from wavemare.failure import run_main
from wavemare.files import atomic_write_text
from wavemare.observe.recording import Recording
from wavemare.training.arguments import TrainArguments, option, parse_arguments
from wavemare.training.models import (
    Evaluation,
    check_model_folder,
    continue_text,
    count_parameters,
    reraise_model_errors,
    start_up_panel,
)
from wavemare.training.setup import (
    Setup,
    connect,
    leave,
    load_run,
    prefer_bf16,
    prepare,
    seed_dropout,
    wait_for_data,
)


@dataclass(frozen=True)
class SftArguments(TrainArguments):
    """Options of supervised fine-tuning."""

    output: str = option("runs/llama-sft", "run folder")
    model: str = option("runs/llama-pretrain/model", "Hugging Face folder of model and tokenizer")
    max_steps: int = option(100, "optimizer steps")
    eval_interval: int = option(50, "steps between evaluations; the best one's model is exported")
    sequence_length: int = option(256, "tokens per sample (--max-length)")
    no_packing: bool = option(False, "one row per sample")
    long_rows: str = option(
        "cut", "rows of more tokens: cut, or left out where the answer is cut away; skip: left out"
    )
    chat_template: str | None = option(None, "file in place of the tokenizer's chat template")
    lora_r: int | None = option(None, "rank of LoRA; all weights are trained if omitted")
    lora_alpha: int = option(32, "LoRA's scale, times the rank")
    lora_targets: str = option("all-linear", "names of the adapted layers, with commas between")
    merge: bool = option(False, "export a full model, with LoRA's weights merged")


def main() -> None:
    """Load, format, train, evaluate, export and answer."""
    args = parse_arguments(SftArguments)
    check_options(args)
    setup = prepare(args)
    check_model_folder(args.model, args.sequence_length, causal=True)
    source = resolve(args.data)
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    connect(setup)
    prefer_bf16(setup)

    from wavemare.data.chat import ChatSamples, describe_fates, mark_trained, prepare_chats

    tokenizer, model = make_model(args)
    cache = Path(args.cache).expanduser()
    train_rows, rows = prepare_chats(
        source, tokenizer, args.sequence_length, cache, long_rows=args.long_rows
    )
    wait_for_data(setup)
    packs = not args.no_packing
    if packs:
        check_packing(model)
    complete(setup.balance.config, lora=args.lora_r is not None, packs=packs)
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    shape: dict[str, Any] = {"max_length": args.sequence_length, "fill": fill, "positions": packs}
    samples = ChatSamples(train_rows, packs=packs, **shape)
    validation = ChatSamples(rows, packs=False, **shape)
    corpus = {
        "name": source.name,
        "rows": f"{len(train_rows)} to train in {len(samples)} samples, {len(rows)} for validation",
    }
    panel = start_up_panel(setup, model, corpus)
    recording.screen.panel("wavemare: supervised fine-tuning", panel)
    recording.screen.note(describe_fates((train_rows, rows), args.sequence_length))
    marked = mark_trained(train_rows[0], tokenizer)
    recording.screen.note(f"\nThe first row, with what is trained in »«:\n{marked}\n")

    exported = setup.folder / "model"
    export = partial(
        wavemare.save_pretrained, folder=exported, tokenizer=tokenizer, merge=args.merge
    )
    best = train(setup, recording, model, samples, validation, export)
    if best is not None:
        if setup.rank == 0:
            asked = question(rows.first, tokenizer)
            recording.screen.note(f"\n{continue_text(exported, asked, args.seed)}\n")
        figures = {"eval_loss": best["eval_loss"], "best step": best["step"]}
        recording.finish({**figures, "parameters": count_parameters(setup, model)})
    leave()


def check_options(args: SftArguments) -> None:
    """Refuse options that cannot work here.

    Raises:
        ConfigError: ``--balance`` or ``--split`` is given, or ``--long_rows`` is another word.
        LaunchError: peft is not installed.
    """
    for name, default in (("balance", "none"), ("split", None)):
        if getattr(args, name) != default:
            reason = "rows of fine-tuning are shared equally, and split by their hash"
            raise ConfigError(f"--{name}", getattr(args, name), reason, "Leave it out")
    if args.long_rows not in ("cut", "skip"):
        reason = "there is no such way to treat them"
        raise ConfigError("--long_rows", args.long_rows, reason, "Give cut or skip")
    if args.lora_r is not None:
        require("peft", "--lora-r")


def complete(config: dict[str, Any], *, lora: bool, packs: bool) -> None:
    """Fill in the learning rate, and what travels through a pipeline, in place."""
    rates = config.get("optimizer", {}).get("params", {})
    if rates.get("lr") == "auto":
        rates["lr"] = 2e-4 if lora else 2e-5
    pipeline = config.get("wavemare", {}).get("pipeline")
    if pipeline is not None:
        pipeline["inputs"] = ["input_ids", "position_ids"] if packs else ["input_ids"]


def make_model(args: SftArguments) -> tuple[Any, Any]:
    """Return the tokenizer and the model to start from, with LoRA's layers if they are wanted.

    Raises:
        ConfigError: The file of the chat template cannot be read.
    """
    from transformers import AutoModelForCausalLM

    from wavemare.data.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(args.model, "--model")
    if args.chat_template is not None:
        try:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "--chat-template", args.chat_template, f"it cannot be read ({error})", "Name a file"
            ) from None
    with reraise_model_errors("--model", args.model):
        folder = Path(args.model).resolve()  # adapters name it
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    if args.lora_r is None:
        return tokenizer, model
    from peft import LoraConfig, get_peft_model

    targets: Any = (
        args.lora_targets if args.lora_targets == "all-linear" else args.lora_targets.split(",")
    )
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    with reraise_model_errors("--lora-targets", args.lora_targets):
        return tokenizer, get_peft_model(model, lora)


def check_packing(model: Any) -> None:
    """Check on a few tokens that rows of a packed sample do not see each other.

    Raises:
        ModelError: The second of two rows differs from the same row alone.
    """
    import torch

    training = model.training
    ids, length = torch.arange(16)[None] % model.config.vocab_size, 8
    positions = torch.arange(length).repeat(2)[None]
    try:
        with torch.no_grad():
            model.eval()
            packed = model(ids, position_ids=positions, use_cache=False).logits[:, length:]
            alone = model(ids[:, length:], use_cache=False).logits
        apart = bool(torch.allclose(packed, alone, atol=1e-3 * float(alone.abs().max())))
    except TypeError:  # it takes no positions
        apart = False
    model.train(training)
    if not apart:
        reason = "it does not keep the rows of a packed sample apart"
        raise ModelError("--model", type(model).__name__, reason, "Give --no-packing")


def train(
    setup: Setup,
    recording: Recording,
    model: Any,
    samples: Any,
    validation: Any,
    export: Callable[[Any], None],
) -> Mapping[str, float] | None:
    """Train, with evaluations and checkpoints on the way; export the engine at the best one.

    Returns:
        The best loss and its step; None if SIGTERM has ended the training early.
    """
    from wavemare.engine import Interruption
    from wavemare.hf.steps import TokenMean

    args, checkpoints = setup.arguments, setup.folder / "checkpoints"
    engine, *_ = wavemare.initialize(model=model, config=setup.balance.config)
    seed_dropout(engine, args.seed)
    evaluation = Evaluation(engine, validation)
    loader = ResumableLoader(
        samples,
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        data_rank=engine.data_rank,
        data_world_size=engine.data_world_size,
        seed=args.seed,
    )
    batches = TokenMean(engine, loader)
    best: dict[str, Any] = {}
    if setup.resume:
        recording.seconds = load_run(engine, checkpoints, loader, args.max_steps)
        if (setup.folder / "best.json").is_file():
            best = json.loads((setup.folder / "best.json").read_text())
        recording.screen.note(f"resumed after step {engine.global_steps}")

    recording.engine = engine
    recording.tokens = engine.train_batch_size() * args.sequence_length
    losses: list[Any] = []
    stop = False
    with recording, Interruption(lead=engine.step_lead) as interruption:
        for step in range(engine.global_steps + 1, args.max_steps + 1):
            with recording.step(step):
                losses.append(engine.train_batch(batches))
            stop = step < args.max_steps and interruption.stops_after(step)
            last = stop or step == args.max_steps
            if step % args.log_interval == 0 or last:
                recording.log(step, loss=float(sum(losses) / len(losses)))
                losses.clear()
            better = False
            if (step % args.eval_interval == 0 or last) and not stop:
                with recording.paused():
                    engine.synchronize()  # what is evaluated is what is exported
                    loss = batches.loss(evaluation.batches(setup.eval_samples))
                recording.run.log(step, eval_loss=loss)
                better = "step" not in best or loss < best["eval_loss"]
            if better:  # before the checkpoint: a run that resumes there evaluates later steps only
                best = {"eval_loss": loss, "step": step}
                with recording.paused():
                    export(engine)
                if setup.rank == 0:
                    atomic_write_text(setup.folder / "best.json", json.dumps(best))
            if step % args.save_interval == 0 or last:
                with recording.saving(step, f"step-{step:06d}") as tag:
                    state = {"loader": loader.state_dict(), "seconds": recording.training_seconds}
                    engine.save_checkpoint(str(checkpoints), tag, client_state=state)
            if stop:  # by SIGTERM
                recording.stopped(step)
                break
        engine.finish_saving()
    return None if stop else best


def question(row: Mapping[str, Any], tokenizer: Any) -> str:
    """Return what the assistant is asked by a row: all before its last answer."""
    if "messages" not in row:
        return str(row.get("prompt") or row.get("text", row.get("completion"))[:40])
    turns: Sequence[Any] = row["messages"]
    while len(turns) > 1 and turns[-1]["role"] != "user":
        turns = turns[:-1]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


if __name__ == "__main__":
    run_main(main)
