"""Learning to continue text: what GPT pretraining and finetuning share."""

from __future__ import annotations

from typing import Any

from wavemare.recipes.job import Job
from wavemare.recipes.text import TextData

__all__ = ["learn_to_continue"]


def learn_to_continue(
    job: Job, text: TextData, model: Any, *, sequence_length: int, prompt: str
) -> None:
    """Train, evaluate, export, reload and let the model write.

    The summary compares the held-out loss with the cross-entropies of the corpus's unigrams and
    bigrams: what one can know of a token without the text, or from the token before it.

    Args:
        job: The run.
        text: Read and tokenised.
        model: A causal language model of transformers.
        sequence_length: Tokens per sample.
        prompt: Start of the text to write.
    """
    config = model.config
    train, held_out = text.pack(
        sequence_length, positions=config.max_position_embeddings, vocabulary=config.vocab_size
    )
    job.build(model, text.describe(), sequence_length=sequence_length)

    def evaluate(num_samples: int | None) -> dict[str, float]:
        return {"held_out_loss": job.held_out_loss(held_out, num_samples)}

    job.fit(job.loader(train), evaluate)
    results = evaluate(None)
    job.run.log(job.arguments.max_steps, **results)
    job.export(text.tokenizer)
    entropies = text.entropies(sequence_length)
    if job.rank == 0:
        job.note(f"\n{_write(job, prompt)}\n")
    named = {f"{name} cross-entropy": value for name, value in entropies.items()}
    job.finish({**results, **named}, baselines=entropies)


def _write(job: Job, prompt: str, tokens: int = 48) -> str:
    """Return the prompt and how the exported model goes on from it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(job.exported)
    tokenizer = AutoTokenizer.from_pretrained(job.exported)
    torch.manual_seed(job.arguments.seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    room = model.config.max_position_embeddings - inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs,
        max_new_tokens=min(tokens, room),
        do_sample=True,
        top_k=40,
        temperature=0.8,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0]))
