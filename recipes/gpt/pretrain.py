# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT-2 on text, from the text to a model that writes.

Run it with ``wavemare train gpt``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.gpt.pretrain \
        --deepspeed_config recipes/gpt/pretrain_pipeline.json

``pretrain_pipeline.json`` cuts the model into two stages, ``pretrain_zero.json`` trains it
data-parallel with ZeRO, on the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavemare.failure import run_main
from wavemare.recipes.arguments import JobArguments, parse_arguments
from wavemare.recipes.gpt.causal import learn_to_continue
from wavemare.recipes.job import Job
from wavemare.recipes.pretrained import naming, read_model_config
from wavemare.recipes.text import TextData


@dataclass
class PretrainArguments(JobArguments):
    """Options of GPT pretraining."""

    output: str = field(default="runs/gpt-pretrain", metadata={"help": "run folder"})
    max_steps: int = field(default=500, metadata={"help": "optimizer steps"})
    save_interval: int = field(default=250, metadata={"help": "steps between checkpoints"})
    model_config: str = field(
        default=str(Path(__file__).with_name("model.json")),
        metadata={"help": "transformers configuration of the model; sizes of text are filled in"},
    )
    vocab_size: int = field(default=4096, metadata={"help": "tokens of the trained BPE"})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Hugging Face folder of a tokenizer to use instead"}
    )
    sequence_length: int = field(default=128, metadata={"help": "tokens per sample"})
    prompt: str | None = field(
        default=None, metadata={"help": "start of the sample text; by default a held-out text's"}
    )


def main() -> None:
    """Pretrain, evaluate, export and sample."""
    arguments = parse_arguments(PretrainArguments)
    job = Job(arguments, "wavemare: GPT pretraining")
    text = TextData(arguments)
    values = read_model_config(
        arguments.model_config, arguments.sequence_length, arguments.megatron.model
    )
    job.connect()
    text.read(kind="gpt", vocab_size=arguments.vocab_size, tokenizer=arguments.tokenizer)
    learn_to_continue(
        job,
        text,
        make_model(arguments, values, text),
        sequence_length=arguments.sequence_length,
        prompt=arguments.prompt,
    )


def make_model(arguments: PretrainArguments, values: Mapping[str, Any], text: TextData) -> Any:
    """Return a new GPT of a checked configuration, with the text's vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    end = text.tokenizer.eos_token_id
    rows = arguments.megatron.vocabulary(len(text.tokenizer))
    sizes = {"vocab_size": rows, "bos_token_id": end, "eos_token_id": end}
    with naming("--model_config", arguments.model_config):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**sizes, **values}))


if __name__ == "__main__":
    run_main(main)
