"""Pretrain a BERT by masked language modelling, from the text to a model that fills gaps.

Run it with ``wavemare train bert``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.bert.pretrain \
        --deepspeed_config recipes/bert/pretrain_pipeline.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavemare.failure import run_main
from wavemare.recipes.job import Job, JobArguments, parse_arguments


@dataclass
class PretrainArguments(JobArguments):
    """Options of BERT pretraining."""

    output: str = field(default="runs/bert-pretrain", metadata={"help": "run folder"})
    model_config: str = field(
        default=str(Path(__file__).with_name("model.json")),
        metadata={"help": "transformers configuration of the model; sizes of text are filled in"},
    )
    vocab_size: int = field(default=4096, metadata={"help": "tokens of the trained BPE"})
    sequence_length: int = field(default=128, metadata={"help": "tokens per sample"})
    mask_probability: float = field(default=0.15, metadata={"help": "share of tokens to guess"})
    prompt: str = field(
        default="def [MASK](self):", metadata={"help": "text with a [MASK] to fill in at the end"}
    )


def main() -> None:
    """Pretrain, evaluate, export and fill a gap."""
    arguments = parse_arguments(PretrainArguments)
    job = Job(arguments, "wavemare: BERT pretraining")

    from wavemare.data import (
        MaskedDataset,
        PackedDataset,
        cached_tokenizer,
        check_fits,
        resolve,
        tokenize,
        unigram_cross_entropy,
    )

    source = resolve(arguments.data)
    job.connect()

    from transformers import AutoConfig, AutoModelForMaskedLM

    corpus = source.load()
    tokenizer = cached_tokenizer(corpus, arguments.vocab_size, "bert", job.cache)
    values = json.loads(Path(arguments.model_config).read_text())
    config = AutoConfig.for_model(
        **{"vocab_size": len(tokenizer), **values, "pad_token_id": tokenizer.pad_token_id}
    )
    train_tokens = tokenize(corpus.train, tokenizer, job.cache)
    held_out_tokens = tokenize(corpus.held_out, tokenizer, job.cache)

    def masked(tokens: Any) -> MaskedDataset:
        length, positions = arguments.sequence_length, config.max_position_embeddings
        check_fits(tokens, length, positions, config.vocab_size)
        return MaskedDataset(
            PackedDataset(tokens, length),
            tokenizer,
            probability=arguments.mask_probability,
            seed=arguments.seed,
        )

    train, held_out = masked(train_tokens), masked(held_out_tokens)
    model = AutoModelForMaskedLM.from_config(config)
    panel = {
        "name": corpus.name,
        "documents": f"{len(corpus.train)} to train, {len(corpus.held_out)} held out",
        "tokens": f"{train_tokens.num_tokens:,} to train, {held_out_tokens.num_tokens:,} held out",
        "vocabulary": len(tokenizer),
    }
    job.build(model, panel, sequence_length=arguments.sequence_length)

    def evaluate(num_samples: int | None) -> Mapping[str, float]:
        return {"held_out_loss": job.held_out_loss(held_out, num_samples)}

    job.fit(job.loader(train), evaluate)
    results = dict(evaluate(None))
    job.run.log(arguments.max_steps, **results)
    job.export(tokenizer)
    unigram = unigram_cross_entropy(train_tokens, held_out_tokens)
    if job.rank == 0:
        job.note(f"\n{fill(job.exported, arguments.prompt)}\n")
    job.finish({**results, "unigram cross-entropy": unigram}, baselines={"unigram": unigram})


def fill(folder: Path, prompt: str, guesses: int = 5) -> str:
    """Return the exported model's likeliest words for the gap in a prompt."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    gap = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[:1, 0]
    if not len(gap):
        return f"{prompt}: no {tokenizer.mask_token} to fill in"
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
