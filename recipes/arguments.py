"""Options that all recipes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from wavemare.errors import ConfigError

__all__ = ["JobArguments", "parse_arguments"]


@dataclass
class JobArguments:
    """Options of every recipe; a recipe's own come on top."""

    deepspeed_config: str = field(metadata={"help": "JSON configuration (DeepSpeed's and ours)"})
    data: str | None = field(
        default=None,
        metadata={
            "help": "text to learn from: a file, folder, glob, datasets name or Megatron prefix; "
            "the Python standard library's source if omitted"
        },
    )
    output: str = field(default="runs/latest", metadata={"help": "run folder"})
    resume: bool = field(default=False, metadata={"help": "go on from the newest checkpoint"})
    max_steps: int = field(default=400, metadata={"help": "optimizer steps"})
    eval_interval: int = field(default=100, metadata={"help": "steps between evaluations"})
    eval_samples: int = field(default=128, metadata={"help": "samples of such an evaluation"})
    save_interval: int = field(default=200, metadata={"help": "steps between checkpoints"})
    log_interval: int = field(default=5, metadata={"help": "steps per line of metrics.jsonl"})
    seed: int = field(default=1234, metadata={"help": "of weights, order and dropout"})
    cache: str = field(
        default="~/.cache/wavemare", metadata={"help": "folder of tokenizers and tokens"}
    )
    local_rank: int = field(default=-1, metadata={"help": "set by the deepspeed launcher"})


Arguments = TypeVar("Arguments", bound=JobArguments)


def parse_arguments(kind: type[Arguments]) -> Arguments:
    """Parse the command line into a recipe's options."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(cast(Any, kind))
    (arguments,) = parser.parse_args_into_dataclasses()
    for name in ("max_steps", "eval_interval", "eval_samples", "save_interval", "log_interval"):
        if getattr(arguments, name) < 1:
            raise ConfigError(
                f"--{name}", getattr(arguments, name), "it is below 1", "Give 1 or more"
            )
    return arguments
