# SPDX-License-Identifier: Apache-2.0
"""Go on training a causal language model from a Hugging Face folder.

::

    wavemare train gpt/finetune -- --model runs/gpt-pretrain/model --data 'notes/*.txt'
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavemare.failure import run_main
from wavemare.recipes.arguments import JobArguments, parse_arguments
from wavemare.recipes.gpt.causal import learn_to_continue
from wavemare.recipes.job import Job
from wavemare.recipes.pretrained import check_model_folder, naming
from wavemare.recipes.text import TextData


@dataclass
class FinetuneArguments(JobArguments):
    """Options of GPT finetuning."""

    output: str = field(default="runs/gpt-finetune", metadata={"help": "run folder"})
    model: str = field(
        default="runs/gpt-pretrain/model",
        metadata={"help": "Hugging Face folder of the model and its tokenizer"},
    )
    max_steps: int = field(default=100, metadata={"help": "optimizer steps"})
    sequence_length: int = field(default=128, metadata={"help": "tokens per sample"})
    prompt: str | None = field(
        default=None, metadata={"help": "start of the sample text; by default a held-out text's"}
    )


def main() -> None:
    """Load, train, evaluate, export and sample."""
    arguments = parse_arguments(FinetuneArguments)
    job = Job(arguments, "wavemare: GPT finetuning")
    check_model_folder(arguments.model, arguments.sequence_length, writes=True)
    text = TextData(arguments)
    job.connect()

    from transformers import AutoModelForCausalLM

    text.read(kind="gpt", tokenizer=arguments.model)
    with naming("--model", arguments.model):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    learn_to_continue(
        job,
        text,
        model,
        sequence_length=arguments.sequence_length,
        prompt=arguments.prompt,
    )


if __name__ == "__main__":
    run_main(main)
