# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model on chats, or on prompts with their completions.

By default the model of ``wavemare train llama`` learns to describe functions. With a model and rows
of one's own (``messages``, ``prompt`` and ``completion``, or ``text``), and with LoRA::

    wavemare train llama/sft -- --model SmolLM2-135M --data chats.jsonl --lora_r 16

Only what the assistant says is trained. Rows are packed, and do not see each other. The loss is the
mean over all trained tokens of a step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wavemare
from wavemare.data.loader import ResumableLoader
from wavemare.data.sources import resolve
from wavemare.errors import ConfigError
from wavemare.extras import require
from wavemare.failure import run_main
from wavemare.files import atomic_write_text
from wavemare.observe.recording import Recording
from wavemare.training.arguments import (
    TokenizerArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.models import (
    Evaluation,
    check_packing,
    check_start,
    count_parameters,
    export,
    load_chat_model,
    start_up_panel,
)
from wavemare.training.samples import continue_text
from wavemare.training.setup import (
    connect,
    leave,
    load_run,
    prefer_bf16,
    prepare,
    save_run,
    seed_dropout,
    wait_for_data,
)


@dataclass(frozen=True)
class SftArguments(TokenizerArguments, TrainArguments):
    """Options of supervised fine-tuning."""

    causal = True

    output: str = option("runs/llama-sft", "run folder")
    model: str = option("runs/llama-pretrain/model", "Hugging Face folder of model and tokenizer")
    max_steps: int = option(100, "optimizer steps")
    eval_interval: int = option(50, "steps between evaluations; the best one's model is exported")
    sequence_length: int = option(256, "tokens per sample")
    no_packing: bool = option(False, "one row per sample")
    long_rows: str = option(
        "cut", "what happens to rows that are too long: cut shortens them, skip leaves them out"
    )
    chat_template: str | None = option(None, "file in place of the tokenizer's chat template")
    lora_r: int | None = option(None, "rank of LoRA; all weights are trained if omitted")
    lora_alpha: int = option(32, "LoRA's alpha: adapters are scaled by alpha / rank")
    lora_targets: str = option("all-linear", "names of the adapted layers, with commas between")
    merge: bool = option(False, "export a full model, with LoRA's weights merged")


def main() -> None:
    """Load, format, train, evaluate, export and answer."""
    # Options and configuration. Most mistakes are refused here, before torch is imported.
    args = parse_arguments(SftArguments)
    check_options(args)
    setup = prepare(args)
    check_start(args)
    source = resolve(args.data)
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    # The model, of which each process reads its own part, and the rows, which one process of each
    # host formats.
    connect(setup)  # before the model: it seeds the weights alike on all processes
    prefer_bf16(setup)  # before anything reads the configuration

    from wavemare.data.chat import (
        ChatSamples,
        describe_fates,
        last_question,
        mark_trained,
        prepare_chats,
    )

    tokenizer, model = load_chat_model(args)
    packs = not args.no_packing
    if packs:
        check_packing(model)
    cache = Path(args.cache).expanduser()
    rows, validation_rows = prepare_chats(
        source, tokenizer, args.sequence_length, cache, long_rows=args.long_rows
    )
    wait_for_data(setup)  # a collective would time out while one host still reads
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    sizes: dict[str, Any] = {"max_length": args.sequence_length, "fill": fill, "positions": packs}
    samples = ChatSamples(rows, packs=packs, **sizes)
    validation = ChatSamples(validation_rows, packs=False, **sizes)
    facts = {
        "name": source.name,
        "rows": f"{len(rows)} to train in {len(samples)} samples, "
        f"{len(validation_rows)} for validation",
    }
    config = complete(setup.config_for(model), lora=args.lora_r is not None, packs=packs)
    panel = start_up_panel(setup, model, facts)
    recording.screen.panel("wavemare: supervised fine-tuning", panel)
    recording.screen.note(describe_fates((rows, validation_rows), args.sequence_length))
    marked = mark_trained(rows[0], tokenizer)
    recording.screen.note(f"\nThe first row, with what is trained in »«:\n{marked}\n")

    # The engine. The loss of a step is the mean over its trained tokens on all ranks.
    from wavemare.engine import Interruption
    from wavemare.hf.steps import TokenMean

    engine, *_ = wavemare.initialize(model=model, config=config)
    recording.screen.note(engine.layout)
    seed_dropout(engine, args.seed)  # before load_run, which restores what was saved
    loader = ResumableLoader.of(engine, samples, seed=args.seed)
    batches = TokenMean(engine, loader)
    evaluation = Evaluation(engine, validation)
    recording.engine = engine
    recording.tokens = engine.train_batch_size() * args.sequence_length
    best: dict[str, Any] = {}
    best_file = setup.folder / "best.json"
    if setup.resume:
        load_run(setup, engine, loader, recording)
        if best_file.is_file():
            best = json.loads(best_file.read_text())

    # Training, until the last step or SIGTERM. The model of the best evaluation is exported.
    folder = setup.folder / "model"
    losses: list[Any] = []
    stop = False
    with recording, Interruption(lead=engine.step_lead) as interruption:
        for step in range(engine.global_steps + 1, args.max_steps + 1):
            with recording.step(step):
                losses.append(engine.train_batch(batches))
            stop = step < args.max_steps and interruption.stops_after(step)
            last = stop or step == args.max_steps
            if last or step % args.log_interval == 0:
                # Reading a loss waits for the device: not every step.
                recording.log(step, loss=float(sum(losses) / len(losses)))
                losses.clear()
            if step == args.max_steps or step % args.eval_interval == 0:
                with recording.paused():
                    engine.synchronize()  # what is evaluated is what is exported
                    loss = batches.loss(evaluation.batches(setup.eval_samples))
                    recording.run.log(step, eval_loss=loss)
                    if not best or loss < best["eval_loss"]:
                        best = {"eval_loss": loss, "step": step}
                        export(args, engine, folder, tokenizer, merge=args.merge)
                        if setup.rank == 0:
                            atomic_write_text(best_file, json.dumps(best))
            if last or step % args.save_interval == 0:
                # After the evaluation: a run that resumes here evaluates later steps only.
                save_run(setup, engine, loader, recording)
            if stop:
                recording.stopped(step)
                break
        engine.finish_saving()

    # An answer of the exported model.
    if not stop:
        if setup.rank == 0:
            asked = last_question(validation_rows.first, tokenizer)
            recording.screen.note(f"\n{continue_text(folder, asked, args.seed)}\n")
        figures = {"eval_loss": best["eval_loss"], "best step": best["step"]}
        recording.finish({**figures, "parameters": count_parameters(setup, model)})
    leave()


def check_options(args: SftArguments) -> None:
    """Refuse options that cannot work here.

    Raises:
        ConfigError: ``--balance`` or ``--split`` is given, ``--long_rows`` is another word, or
            LoRA is to be written for Megatron.
        LaunchError: peft is not installed.
    """
    for name, default in (("balance", "none"), ("split", None)):
        if getattr(args, name) != default:
            reason = "rows of fine-tuning are shared equally, and split by their hash"
            raise ConfigError(f"--{name}", getattr(args, name), reason, "Leave it out")
    if args.long_rows not in ("cut", "skip"):
        reason = "there is no such way to treat them"
        raise ConfigError("--long_rows", args.long_rows, reason, "Give cut or skip")
    if args.save_megatron is not None and args.lora_r is not None:
        reason = "Megatron's checkpoints have no adapters"
        remedy = f"Leave it out, give --merge, and convert {args.output}/model"
        raise ConfigError("--save-megatron", args.save_megatron, reason, remedy)
    if args.lora_r is not None:
        require("peft", "--lora_r")


def complete(config: dict[str, Any], *, lora: bool, packs: bool) -> dict[str, Any]:
    """Fill in the learning rate, and what travels through a pipeline."""
    rates = config.get("optimizer", {}).get("params", {})
    if rates.get("lr") == "auto":
        rates["lr"] = 2e-4 if lora else 2e-5
    pipeline = config.get("wavemare", {}).get("pipeline")
    if pipeline is not None:
        pipeline["inputs"] = ["input_ids", "position_ids"] if packs else ["input_ids"]
    return config


if __name__ == "__main__":
    run_main(main)
