# SPDX-License-Identifier: Apache-2.0
"""Options that all recipes share."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NoReturn, TypeVar, cast

from wavemare.engine.launch.group import environment_rank
from wavemare.errors import ConfigError, did_you_mean
from wavemare.recipes.megatron_options import NAMES, Changes, translate

__all__ = ["JobArguments", "parse_arguments"]

_LARGEST_SEED = 2**32 - 2  # models are seeded by it, and their dropout by the next one
_POSITIVE = {
    "max_steps",
    "eval_interval",
    "eval_samples",
    "save_interval",
    "log_interval",
    "sequence_length",
    "vocab_size",
    "stages",
    "micro_batches",
}


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
    text_column: str = field(
        default="text", metadata={"help": "column of the text, where the data is a table"}
    )
    split: str | None = field(
        default=None,
        metadata={
            "help": "shares of Megatron data to train on, to evaluate on and to leave, such as "
            "969,30,1; GPT then reads it in Megatron's order"
        },
    )
    output: str = field(default="runs/latest", metadata={"help": "run folder"})
    resume: bool = field(default=False, metadata={"help": "go on from the newest checkpoint"})
    max_steps: int = field(default=400, metadata={"help": "optimizer steps"})
    eval_interval: int = field(default=100, metadata={"help": "steps between evaluations"})
    eval_samples: int = field(default=128, metadata={"help": "samples of such an evaluation"})
    save_interval: int = field(default=200, metadata={"help": "steps between checkpoints"})
    log_interval: int = field(default=5, metadata={"help": "steps per line of metrics.jsonl"})
    trace_steps: int = field(
        default=4,
        metadata={"help": "steps that every rank notes action by action, for wavemare report"},
    )
    seed: int = field(default=1234, metadata={"help": "of weights, order and dropout"})
    cache: str = field(
        default="~/.cache/wavemare", metadata={"help": "folder of tokenizers and tokens"}
    )
    balance: str = field(
        default="none",
        metadata={
            "help": "how unlike devices share the work: auto measures them, none shares equally, "
            "or the file of a plan (wavemare plan search --output, or plan.json of a run)"
        },
    )
    local_rank: int = field(default=-1, metadata={"help": "set by the deepspeed launcher"})
    megatron: Changes = field(init=False, default_factory=Changes)  # by Megatron's names


Arguments = TypeVar("Arguments", bound=JobArguments)


def parse_arguments(kind: type[Arguments]) -> Arguments:
    """Parse the command line into a recipe's options.

    Raises:
        ConfigError: An option does not exist, lacks its value or has a wrong one.
    """
    from transformers import HfArgumentParser

    def refuse(message: str) -> NoReturn:
        raise _of_parser(message, sys.argv[1:])

    parser = HfArgumentParser(cast(Any, kind), allow_abbrev=False)
    cast(Any, parser).error = refuse
    # Every rank is asked for help, one gives it.
    with redirect_stdout(io.StringIO() if environment_rank() else sys.stdout):
        words, changes = translate(sys.argv[1:])
        arguments, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    if rest:
        name = rest[0].split("=")[0].lstrip("-")
        remedy = did_you_mean(name, [*NAMES, *(o.name for o in fields(kind) if o.init)])
        raise ConfigError(rest[0], " ".join(rest[1:]), "there is no such option", remedy)
    _check_values(arguments)
    changes.check(vars(arguments))
    arguments.megatron = changes
    return cast(Arguments, arguments)


def _of_parser(message: str, words: Sequence[str]) -> ConfigError:
    """Return the error that argparse describes in a sentence, by the option that it names."""
    match = re.match(r"argument (\S+?)(?:/\S+)?: (.*)", message)
    if match is None:
        return ConfigError("options", " ".join(words), message, "See them with --help")
    option, reason = match[1], match[2].rstrip(".")
    spelled = {option, option.replace("_", "-")}
    values = [word.partition("=")[2] for word in words if word.partition("=")[0] in spelled]
    following = [after for word, after in pairwise(words) if word in spelled]
    value = next((v for v in [*following, *values] if v), None)
    return ConfigError(option, value, reason, "See all options with --help")


def _check_values(arguments: JobArguments) -> None:
    """Check what argparse lets through.

    Raises:
        ConfigError: A number is out of range, or a text is empty.
    """
    for option in fields(arguments):
        value = getattr(arguments, option.name)
        if isinstance(value, str) and not value.strip():
            reason = "it is empty"
            raise ConfigError(f"--{option.name}", value, reason, "Give a value, or leave it out")
        if option.name in _POSITIVE and value is not None and value < 1:
            raise ConfigError(f"--{option.name}", value, "it is below 1", "Give 1 or more")
    if arguments.trace_steps < 0:
        reason = "it is below 0"
        raise ConfigError(
            "--trace_steps", arguments.trace_steps, reason, "Give 0 for none, or more"
        )
    if not 0 <= arguments.seed <= _LARGEST_SEED:
        reason = "numpy's generators do not take it"
        raise ConfigError("--seed", arguments.seed, reason, f"Give 0 to {_LARGEST_SEED}")
