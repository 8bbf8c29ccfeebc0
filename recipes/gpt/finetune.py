# SPDX-License-Identifier: Apache-2.0
"""Continue training a causal language model from a Hugging Face folder.

::

    wavemare train gpt/finetune -- --model runs/gpt-pretrain/model --data 'notes/*.txt'
"""

from __future__ import annotations

from dataclasses import dataclass

from wavemare.failure import run_main
from wavemare.observe.recording import Recording
from wavemare.recipes.gpt.pretrain import learn
from wavemare.training.arguments import (
    TokenizerArguments,
    TrainArguments,
    option,
    parse_arguments,
)
from wavemare.training.models import check_model_folder, reraise_model_errors
from wavemare.training.setup import connect, prepare, wait_for_data
from wavemare.training.text import find_text, read_text


@dataclass(frozen=True)
class FinetuneArguments(TokenizerArguments, TrainArguments):
    """Options of GPT finetuning."""

    output: str = option("runs/gpt-finetune", "run folder")
    model: str = option(
        "runs/gpt-pretrain/model", "Hugging Face folder of the model and its tokenizer"
    )
    max_steps: int = option(100, "optimizer steps")
    prompt: str | None = option(None, "start of the sample text; by default a validation text's")


def main() -> None:
    """Load, train, evaluate, export and sample."""
    args = parse_arguments(FinetuneArguments)
    setup = prepare(args)
    check_model_folder(args.model, args.sequence_length, causal=True)
    source = find_text(args)
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    connect(setup)
    text = read_text(source, args, "gpt", tokenizer=args.tokenizer or args.model)
    wait_for_data(setup)

    from transformers import AutoModelForCausalLM

    with reraise_model_errors("--model", args.model):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    learn(setup, recording, model, text, args.prompt, "wavemare: GPT finetuning")


if __name__ == "__main__":
    run_main(main)
