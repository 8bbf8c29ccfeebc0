# SPDX-License-Identifier: Apache-2.0
"""Pretrain a BERT by masked language modelling, from the text to a model that fills gaps.

Run it with ``wavemare train bert``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.bert.pretrain \
        --deepspeed_config recipes/bert/pretrain_pipeline.json
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavemare.errors import ConfigError
from wavemare.failure import run_main
from wavemare.recipes.arguments import JobArguments, parse_arguments
from wavemare.recipes.job import Job
from wavemare.recipes.pretrained import longest, naming, read_model_config
from wavemare.recipes.text import TextData


@dataclass
class PretrainArguments(JobArguments):
    """Options of BERT pretraining."""

    output: str = field(default="runs/bert-pretrain", metadata={"help": "run folder"})
    model_config: str = field(
        default=str(Path(__file__).with_name("model.json")),
        metadata={"help": "transformers configuration of the model; sizes of text are filled in"},
    )
    vocab_size: int = field(default=4096, metadata={"help": "tokens of the trained BPE"})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Hugging Face folder of a tokenizer to use instead"}
    )
    sequence_length: int = field(default=128, metadata={"help": "tokens per sample"})
    mask_probability: float = field(default=0.15, metadata={"help": "share of tokens to guess"})
    prompt: str = field(
        default="def [MASK](self):", metadata={"help": "text with a [MASK] to fill in at the end"}
    )


def main() -> None:
    """Pretrain, evaluate, export and fill a gap."""
    arguments = parse_arguments(PretrainArguments)
    job = Job(arguments, "wavemare: BERT pretraining")

    text = TextData(arguments)
    values = read_model_config(
        arguments.model_config, arguments.sequence_length, arguments.megatron.model
    )
    job.connect()

    text.read(kind="bert", vocab_size=arguments.vocab_size, tokenizer=arguments.tokenizer)
    model = make_model(arguments, values, text)
    check_gap(text.tokenizer, arguments.prompt, longest(model.config))
    train, held_out = masked_samples(arguments, text, model.config)
    job.build(model, text.describe(), sequence_length=arguments.sequence_length)

    def evaluate(num_samples: int | None) -> dict[str, float]:
        return {"held_out_loss": job.held_out_loss(held_out, num_samples)}

    job.fit(job.loader(train, held_out), evaluate)
    results = evaluate(None)
    job.export(text.tokenizer)
    unigram = text.entropies(arguments.sequence_length)["unigram"]
    job.finish(
        {**results, "unigram cross-entropy": unigram},
        use=lambda: fill(job.exported, arguments.prompt),
        baselines={"unigram": unigram},
    )


def make_model(arguments: PretrainArguments, values: Mapping[str, Any], text: TextData) -> Any:
    """Return a new BERT of a checked configuration, with the text's vocabulary."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    rows = arguments.megatron.vocabulary(len(text.tokenizer))
    sizes = {"vocab_size": rows, "pad_token_id": text.tokenizer.pad_token_id}
    with naming("--model_config", arguments.model_config):
        return AutoModelForMaskedLM.from_config(AutoConfig.for_model(**{**sizes, **values}))


def masked_samples(arguments: PretrainArguments, text: TextData, config: Any) -> tuple[Any, Any]:
    """Return the samples to train on and those held out, with gaps to fill."""
    from wavemare.data import MaskedDataset

    packed = text.pack(
        arguments.sequence_length, positions=longest(config), vocabulary=config.vocab_size
    )
    train, held_out = (
        MaskedDataset(
            part.store,
            arguments.sequence_length,
            text.tokenizer,
            probability=arguments.mask_probability,
            seed=arguments.seed,
        )
        for part in packed
    )
    return train, held_out


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
