# SPDX-License-Identifier: Apache-2.0
"""What an exported model says: the sample at the end of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wavemare.training.models import max_positions


def continue_text(folder: Path, prompt: str, seed: int, tokens: int = 48) -> str:
    """Return a prompt and an exported model's continuation of it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from wavemare.data.tokenizer import begin_text

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    room = max_positions(model.config)
    most = min(room, 2**20) - 1  # tokenizers count in 32 bits
    ids = torch.tensor([begin_text(prompt, tokenizer)[:most]])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(tokens, room - ids.shape[1]),
        do_sample=True,
        top_k=40,
        temperature=0.8,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0]))


def fill_gap(folder: Path, prompt: str, guesses: int = 5) -> str:
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


def classify(folder: Path, text: str) -> str:
    """Return the exported model's class of a text, and how sure it is."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    room = max_positions(model.config)
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=room)
    with torch.no_grad():
        probabilities = model(**inputs).logits[0].softmax(-1)
    best = int(probabilities.argmax())
    return f"{model.config.id2label[best]} {float(probabilities[best]):.0%}"
