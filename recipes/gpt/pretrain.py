"""Pretrain a GPT-2 on text, from the text to a model that writes.

Run it with ``wavemare train gpt``, or as any DeepSpeed script::

    deepspeed --num_gpus 2 --module wavemare.recipes.gpt.pretrain \
        --deepspeed_config recipes/gpt/pretrain_pipeline.json

``pretrain_pipeline.json`` cuts the model into two stages, ``pretrain_zero.json`` trains it
data-parallel with ZeRO: nothing else differs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from wavemare.failure import run_main
from wavemare.recipes.gpt.causal import CausalText
from wavemare.recipes.job import Job, JobArguments, parse_arguments


@dataclass
class PretrainArguments(JobArguments):
    """Options of GPT pretraining."""

    output: str = field(default="runs/gpt-pretrain", metadata={"help": "run folder"})
    model_config: str = field(
        default=str(Path(__file__).with_name("model.json")),
        metadata={"help": "transformers configuration of the model; sizes of text are filled in"},
    )
    vocab_size: int = field(default=4096, metadata={"help": "tokens of the trained BPE"})
    sequence_length: int = field(default=128, metadata={"help": "tokens per sample"})
    prompt: str = field(default="def ", metadata={"help": "start of the sample text"})


def main() -> None:
    """Pretrain, evaluate, export and sample."""
    arguments = parse_arguments(PretrainArguments)
    job = Job(arguments, "wavemare: GPT pretraining")
    text = CausalText(job, arguments.data)
    job.connect()

    from transformers import AutoConfig, AutoModelForCausalLM

    text.train_tokenizer(arguments.vocab_size)
    values = json.loads(Path(arguments.model_config).read_text())
    end = text.tokenizer.eos_token_id
    config = AutoConfig.for_model(
        **{"vocab_size": len(text.tokenizer), **values, "bos_token_id": end, "eos_token_id": end}
    )
    text.pack(
        arguments.sequence_length, config.max_position_embeddings, vocabulary=config.vocab_size
    )
    model = AutoModelForCausalLM.from_config(config)

    job.build(model, text.describe(), sequence_length=arguments.sequence_length)
    text.learn()
    text.report(arguments.prompt)


if __name__ == "__main__":
    run_main(main)
