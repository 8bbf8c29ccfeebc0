# SPDX-License-Identifier: Apache-2.0
"""Pretrain a BERT by masked language modelling, from the text to a model that fills gaps.

Run it with ``wavemare train bert``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.bert.pretrain \
        --deepspeed_config recipes/bert/pretrain_pipeline.json
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import wavemare
from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.observe.recording import Recording
from wavemare.recipes.gpt.pretrain import Evaluate, eval_loss, train
from wavemare.training.arguments import (
    ModelArguments,
    TokenizerArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.models import (
    count_parameters,
    max_positions,
    read_model_config,
    reraise_model_errors,
    start_up_panel,
)
from wavemare.training.setup import Setup, connect, leave, prepare, wait_for_data
from wavemare.training.text import Baselines, TrainingText, find_text, read_text


@dataclass(frozen=True)
class PretrainArguments(TokenizerArguments, ModelArguments, TrainArguments):
    """Options of BERT pretraining."""

    output: str = option("runs/bert-pretrain", "run folder")
    model_config: str = option(
        str(Path(__file__).with_name("model.json")), "transformers configuration of the model"
    )
    mask_probability: float = option(0.15, "share of tokens to guess")
    prompt: str = option("def [MASK](self):", "text with a [MASK] to fill in at the end")


def main() -> None:
    """Pretrain, evaluate, export and fill a gap."""
    # Options first: most mistakes are refused before torch and DeepSpeed are imported.
    args = parse_arguments(PretrainArguments)
    setup = prepare(args)
    source = find_text(args)
    shape = read_model_config(args.model_config, args.sequence_length, args.sizes())
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    connect(setup)
    size = args.trained_vocabulary
    text = read_text(source, args, "bert", tokenizer=args.tokenizer, vocab_size=size)
    wait_for_data(setup)
    model = make_model(args, shape, text.tokenizer, setup.section.tensor_parallel.size)
    check_gap(text.tokenizer, args.prompt, max_positions(model.config))
    samples, validation = masked_samples(args, text, model.config)

    panel = start_up_panel(setup, model, text.describe())
    recording.screen.panel("wavemare: BERT pretraining", panel)
    evaluation = train(setup, recording, model, samples, validation, eval_loss)
    if evaluation is not None:
        exported = finish(setup, recording, model, text.tokenizer, evaluation, eval_loss)
        if setup.rank == 0:
            recording.screen.note(f"\n{fill(exported, args.prompt)}\n")
        recording.finish({}, partial(unigrams, text, args.sequence_length))
    leave()


def unigrams(text: TrainingText, sequence_length: int) -> Baselines:
    """Return the baselines of a model that reads both sides of a gap: not the bigrams."""
    results, losses = text.baselines(sequence_length)
    kept = {name: value for name, value in results.items() if "bigram" not in name}
    return kept, {"unigram": losses["unigram"]} if losses else {}


def finish(
    setup: Setup,
    recording: Recording,
    model: Any,
    tokenizer: Any,
    evaluation: Any,
    evaluate: Evaluate,
) -> Path:
    """Evaluate the trained model and export it; return its folder."""
    evaluation.engine.synchronize()  # what is evaluated is what is exported
    found = evaluate(evaluation, setup.final_samples)
    recording.run.log(setup.arguments.max_steps, **found)
    counts = evaluation.counts(setup.final_samples)
    parameters = count_parameters(setup, model)
    recording.results = {**found, **counts, "parameters": parameters, **recording.results}
    exported = setup.folder / "model"
    wavemare.save_pretrained(evaluation.engine, exported, tokenizer=tokenizer)
    return exported


def make_model(
    args: ModelArguments, shape: dict[str, Any], tokenizer: Any, tensor_parallel: int = 1
) -> Any:
    """Return a new BERT of a checked configuration, with the tokenizer's vocabulary."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    rows = args.padded(len(tokenizer), tensor_parallel)
    config = {"vocab_size": rows, "pad_token_id": tokenizer.pad_token_id, **shape}
    with reraise_model_errors("--model_config", args.model_config):
        return AutoModelForMaskedLM.from_config(AutoConfig.for_model(**config))


def masked_samples(args: PretrainArguments, text: TrainingText, config: Any) -> tuple[Any, Any]:
    """Return samples with gaps to fill, to train on and to validate on."""
    from wavemare.data.samples import MaskedDataset

    stores = text.single()
    text.check_fits(args.sequence_length, config)
    options: dict[str, Any] = {"probability": args.mask_probability, "seed": args.seed}
    train, validation = (
        MaskedDataset(store, args.sequence_length, text.tokenizer, **options) for store in stores
    )
    return train, validation


def check_gap(tokenizer: Any, prompt: str, positions: int) -> None:
    """Check that a prompt has a gap to fill in and fits the model.

    Raises:
        ConfigError: It has none, or is too long.
    """
    tokens = tokenizer(prompt)["input_ids"]
    if tokenizer.mask_token_id not in tokens or len(tokens) > positions:
        reason = f"it has no {tokenizer.mask_token}, or more than the model's {positions} tokens"
        raise ConfigError("--prompt", prompt, reason, "Give a text such as 'def [MASK](self):'")


def fill(folder: Path, prompt: str, guesses: int = 5) -> str:
    """Return the exported model's likeliest words for the gap in a prompt."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    gap = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[:1, 0]
    with torch.no_grad():
        probabilities = model(**inputs).logits[0, gap[0]].softmax(-1)
    best = probabilities.topk(guesses)
    words = (
        f"{str(tokenizer.decode([token])).strip()!r} {probability:.0%}"
        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    return f"{prompt}  ->  {', '.join(words)}"


if __name__ == "__main__":
    run_main(main)
