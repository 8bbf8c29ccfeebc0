# SPDX-License-Identifier: Apache-2.0
"""Learning to continue text: what GPT pretraining and finetuning share."""

from __future__ import annotations

from typing import Any

from wavemare.errors import ConfigError
from wavemare.recipes.job import Job
from wavemare.recipes.pretrained import longest
from wavemare.recipes.text import TextData

__all__ = ["learn_to_continue"]


def learn_to_continue(
    job: Job, text: TextData, model: Any, *, sequence_length: int, prompt: str | None
) -> None:
    """Train, evaluate, export, reload and let the model write.

    The summary compares the held-out loss with the cross-entropies of the corpus's unigrams and
    bigrams: what one can know of a token without the text, or from the token before it.

    Args:
        job: The run.
        text: Read and tokenised.
        model: A causal language model of transformers.
        sequence_length: Tokens per sample.
        prompt: Start of the text to write; by default the held-out texts'.

    Raises:
        ConfigError: The prompt is empty, or longer than the model takes.
    """
    config = model.config
    if prompt is not None:
        _check_prompt(text, prompt, longest(config))
    sizes = {"positions": longest(config), "vocabulary": config.vocab_size}
    if text.in_megatron_order:
        train, held_out = text.megatron_samples(
            sequence_length, **sizes, num_samples=job.num_samples, seed=job.arguments.seed
        )
    else:
        train, held_out = text.pack(sequence_length, **sizes)
    job.build(model, text.describe(), sequence_length=sequence_length)

    def evaluate(num_samples: int | None) -> dict[str, float]:
        return {"held_out_loss": job.held_out_loss(held_out, num_samples)}

    job.fit(job.loader(train, held_out, shuffle=not text.in_megatron_order), evaluate)
    results = evaluate(None)
    job.export(text.tokenizer)
    entropies = text.entropies(sequence_length)
    named = {f"{name} cross-entropy": value for name, value in entropies.items()}
    start = text.beginning(longest(config)) if prompt is None else prompt
    job.finish({**results, **named}, use=lambda: _write(job, start), baselines=entropies)


def _check_prompt(text: TextData, prompt: str, positions: int) -> None:
    length = len(text.tokenizer(prompt)["input_ids"])
    if not 0 < length < positions:
        reason = f"it has {length} tokens, and the model takes {positions}"
        remedy = f"Give a prompt of 1 to {positions - 1} tokens"
        raise ConfigError("--prompt", prompt, reason, remedy)


def _write(job: Job, prompt: str, tokens: int = 48) -> str:
    """Return the prompt and how the exported model goes on from it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(job.exported)
    tokenizer = AutoTokenizer.from_pretrained(job.exported)
    torch.manual_seed(job.arguments.seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    room = longest(model.config) - inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs,
        max_new_tokens=min(tokens, room),
        do_sample=True,
        top_k=40,
        temperature=0.8,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0]))
