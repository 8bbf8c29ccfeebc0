# SPDX-License-Identifier: Apache-2.0
"""Options that recipes share, in DeepSpeed's, Hugging Face's and Megatron's spellings."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from wavemare.engine.config.shape import SECTION
from wavemare.engine.launch.group import environment_rank
from wavemare.errors import ConfigError, did_you_mean

_LARGEST_SEED = 2**32 - 2  # models are seeded by it, and their dropout by the next one
_SPELLINGS = {"--train_iters": "--max_steps"} | dict.fromkeys(
    ("--seq_length", "--max_length"), "--sequence_length"
)
"""Megatron's and TRL's names of options that have another name here; dashes may be underscores."""
_AT_LEAST_0 = {"trace_steps", "lr_warmup_iters", "eval_iters"}  # of whole numbers
_TOKENIZERS = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "BertWordPieceLowerCase")
_MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
ALL = "all"
"""The word for all samples."""
SIZES = {"num_layers": "num_hidden_layers"} | {
    name: name for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")
}
"""transformers' names of a model's sizes, by Megatron's."""
_VOCABULARY = 4096
_OF_A_NEW_MODEL = *SIZES, "make_vocab_size_divisible_by", "model_config"


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class MegatronArguments:
    """Megatron's options that change the JSON configuration or other options."""

    micro_batch_size: int | None = option(
        None, "train_micro_batch_size_per_gpu of the JSON; alone, without accumulation"
    )
    global_batch_size: int | None = option(None, "train_batch_size of the JSON")
    lr: float | None = option(None, "learning rate of the JSON")
    min_lr: float | None = option(None, "lowest learning rate of the cosine schedule")
    lr_decay_style: str | None = option(None, "cosine, linear or constant")
    lr_warmup_fraction: float | None = option(None, "share of the steps for warm-up, such as 0.1")
    lr_warmup_iters: int | None = option(None, "the same as a number of steps")
    weight_decay: float | None = option(None, "weight decay of the JSON")
    clip_grad: float | None = option(None, "gradient_clipping of the JSON")
    fp16: bool = option(False, "turn on fp16 in the JSON")
    bf16: bool = option(False, "turn on bf16 in the JSON")
    tensor_model_parallel_size: int | None = option(None, "wavemare.tensor_parallel.size")
    pipeline_model_parallel_size: int | None = option(None, "wavemare.pipeline.stages")
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "wavemare.pipeline.chunks, with the schedule interleaved"
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "the same, given as layers per stage; needs --num-layers"
    )
    tensorboard_dir: str | None = option(None, "turn on DeepSpeed's tensorboard monitor")
    wandb_project: str | None = option(None, "turn on DeepSpeed's wandb monitor")
    eval_iters: int | None = option(
        None, "batches of an evaluation, in place of --eval_samples; also of the last one"
    )
    data_path: list[str] | None = field(
        default=None, metadata={"help": "--data, split 969,30,1; several words are a blend"}
    )
    save: str | None = option(None, "--output")
    load: str | None = option(None, "--output, and --resume if it has a checkpoint")
    deepspeed: bool = option(False, "ignored: all recipes use DeepSpeed")


JSON_KEYS: dict[str, tuple[str, ...]] = {
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
    "global_batch_size": ("train_batch_size",),
    "lr": ("optimizer", "params", "lr"),
    "weight_decay": ("optimizer", "params", "weight_decay"),
    "clip_grad": ("gradient_clipping",),
    "tensor_model_parallel_size": (SECTION, "tensor_parallel", "size"),
    "pipeline_model_parallel_size": (SECTION, "pipeline", "stages"),
    "tensorboard_dir": ("tensorboard", "output_path"),
    "wandb_project": ("wandb", "project"),
}
"""Keys of the JSON that Megatron's options replace."""


@dataclass(frozen=True)
class TrainArguments(MegatronArguments):
    """Options of every recipe."""

    deepspeed_config: str = option("", "JSON configuration (DeepSpeed's and ours)")
    set: list[str] = field(
        default_factory=list,
        metadata={
            "help": "changes of the JSON: KEY.KEY=VALUE KEY.KEY=VALUE ...; null removes a key",
            "action": "extend",
        },
    )
    data: str | None = option(
        None,
        "text to learn from: a file, folder, glob, datasets name or Megatron prefix; the Python "
        "standard library's source if omitted",
    )
    text_column: str = option("text", "column of the text, where the data is a table")
    split: str | None = option(
        None,
        "shares of Megatron data to train on, to validate on and to leave, such as 969,30,1; GPT "
        "then reads it in Megatron's order",
    )
    output: str = option("runs/latest", "run folder")
    resume: bool = option(False, "continue from the newest checkpoint of the run folder")
    max_steps: int = option(400, "optimizer steps")
    eval_interval: int = option(100, "steps between evaluations")
    eval_samples: int = option(128, "samples of each such evaluation")
    final_eval_samples: str = option(
        "8192", "samples of the last evaluation at most, spread over the validation data; or all"
    )
    save_interval: int = option(200, "steps between checkpoints")
    log_interval: int = option(5, "steps per line of metrics.jsonl")
    trace_steps: int = option(4, "steps that every rank records action by action, for the report")
    seed: int = option(1234, "seed of weights, data order and dropout")
    cache: str = option("~/.cache/wavemare", "folder of tokenizers and tokens")
    balance: str = option(
        "none",
        "how devices of unequal speed share the work: auto measures them, none shares equally; or "
        "a layout's file (of wavemare layout search --output, or layout.json of a run)",
    )
    sequence_length: int = option(128, "tokens per sample")
    local_rank: int = option(-1, "set by the deepspeed launcher")

    def given(self) -> dict[str, Any]:
        """Return the options that have a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class ModelArguments:
    """Options of a new model."""

    model_config: str = option("", "transformers configuration of a new model")
    vocab_size: int | None = option(None, f"tokens of the trained BPE; {_VOCABULARY} if omitted")
    num_layers: int | None = option(None, "layers, in place of the configuration's")
    hidden_size: int | None = option(None, "width, in place of the configuration's")
    num_attention_heads: int | None = option(None, "heads, in place of the configuration's")
    max_position_embeddings: int | None = option(None, "positions, in place of the configuration's")
    make_vocab_size_divisible_by: int | None = option(
        None, "pad the vocabulary to a multiple of this times the tensor-parallel size"
    )

    @property
    def trained_vocabulary(self) -> int:
        """Number of tokens of a tokenizer that is trained."""
        return self.vocab_size or _VOCABULARY

    def sizes(self) -> dict[str, int]:
        """Return the given sizes of the model by transformers' names."""
        sizes = {name: getattr(self, own) for own, name in SIZES.items()}
        return {name: size for name, size in sizes.items() if size is not None}

    def padded(self, vocabulary: int, tensor_parallel: int) -> int:
        """Return the rows of an embedding for so many tokens."""
        multiple = (self.make_vocab_size_divisible_by or 1) * tensor_parallel
        if self.make_vocab_size_divisible_by is None:
            return vocabulary
        return math.ceil(vocabulary / multiple) * multiple


@dataclass(frozen=True)
class TokenizerArguments:
    """Options of a tokenizer that is not trained."""

    tokenizer: str | None = option(None, "Hugging Face folder of a tokenizer to use instead")
    tokenizer_type: str | None = option(None, f"Megatron's: one of {', '.join(_TOKENIZERS)}")
    vocab_file: str | None = option(None, "Megatron's: a file in the folder of --tokenizer")
    merge_file: str | None = option(None, "Megatron's: a file in the folder of --tokenizer")


Arguments = TypeVar("Arguments", bound=TrainArguments)


def parse_arguments(kind: type[Arguments], words: Sequence[str] | None = None) -> Arguments:
    """Parse and check the command line of a recipe.

    Args:
        kind: The recipe's options.
        words: The command line; by default that of this process.

    Raises:
        ConfigError: An option does not exist, lacks its value, has a wrong one, or has no effect.
    """
    from transformers import HfArgumentParser

    words = [_spelled(word) for word in (sys.argv[1:] if words is None else words)]

    def refuse(message: str) -> NoReturn:
        raise _parser_error(message, words)

    parser = HfArgumentParser(cast(Any, kind), allow_abbrev=False)
    cast(Any, parser).error = refuse
    # All ranks parse --help, and one prints it.
    with redirect_stdout(io.StringIO() if environment_rank() else sys.stdout):
        parsed, rest = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
    arguments: Arguments = parsed
    if rest:
        name = rest[0].split("=")[0].lstrip("-")
        remedy = did_you_mean(name, [f.name for f in fields(kind)])
        value = rest[1] if rest[1:] and not rest[1].startswith("--") else None
        others = [word for word in rest[1:] if word.startswith("--")]
        reason = ", nor ".join(["there is no such option", *others])
        raise ConfigError(rest[0], value, reason, remedy)
    for each in fields(arguments):
        _check_value(each.name, getattr(arguments, each.name), each.default)
    if not arguments.deepspeed_config:
        raise ConfigError("--deepspeed_config", None, "it is missing", "Name a JSON file")
    arguments = _resolve_megatron(arguments)
    if isinstance(arguments, ModelArguments):
        _refuse_idle(arguments)
    return arguments


def _refuse_idle(given: ModelArguments) -> None:
    """Refuse options of a new model and a new tokenizer where these come from folders.

    Raises:
        ConfigError: Such an option is given.
    """
    model, tokenizer = (getattr(given, name, None) for name in ("model", "tokenizer"))
    for folder, names, reason in (
        (model, _OF_A_NEW_MODEL, "the model comes from a folder, with its own configuration"),
        (model or tokenizer, ("vocab_size",), "the tokenizer comes from a folder, with its tokens"),
    ):
        for each in fields(given):
            value = getattr(given, each.name)
            if folder is not None and each.name in names and value != each.default:
                raise ConfigError(f"--{each.name}", value, reason, "Leave it out")


def _spelled(word: str) -> str:
    name, equals, value = word.partition("=")
    return _SPELLINGS.get(name.replace("-", "_").replace("__", "--", 1), name) + equals + value


def _parser_error(message: str, words: Sequence[str]) -> ConfigError:
    """Return the error that argparse describes in a sentence, by the option that it names."""
    match = re.match(r"argument (\S+?)(?:/\S+)?: (.*)", message)
    if match is None:
        return ConfigError("options", " ".join(words), message, "See them with --help")
    spelled = {match[1], match[1].replace("_", "-")}
    values = [word.partition("=")[2] for word in words if word.partition("=")[0] in spelled]
    following = [after for word, after in pairwise(words) if word in spelled]
    value = next((v for v in [*following, *values] if v), None)
    return ConfigError(match[1], value, match[2].rstrip("."), "See all options with --help")


def _check_value(name: str, value: Any, default: Any) -> None:
    """Check what argparse accepts.

    Raises:
        ConfigError: A number is out of range, or a text is empty.
    """
    key = f"--{name}"
    if isinstance(value, str) and not value.strip() and default != "":
        raise ConfigError(key, value, "it is empty", "Give a value, or leave it out")
    if name == "final_eval_samples" and value != ALL and not re.fullmatch("0*[1-9][0-9]*", value):
        raise ConfigError(key, value, "it is no number of samples", f"Give 1 or more, or {ALL}")
    if isinstance(value, bool) or not isinstance(value, int | float) or name == "local_rank":
        return
    if name == "seed":
        if not 0 <= value <= _LARGEST_SEED:
            reason = "numpy's generators do not take it"
            raise ConfigError(key, value, reason, f"Give 0 to {_LARGEST_SEED}")
    elif isinstance(value, int) and name not in _AT_LEAST_0:
        if value < 1:
            raise ConfigError(key, value, "it is below 1", "Give 1 or more")
    elif not 0 <= value < math.inf:
        raise ConfigError(key, value, "it is no number of 0 or more", "Give one")
    if name == "lr_warmup_fraction" and value > 1:
        raise ConfigError(key, value, "it is a share of all steps", "Give 0 to 1")


def _resolve_megatron(arguments: Arguments) -> Arguments:
    """Return the options with Megatron's in place of the recipe's own."""
    given: Any = arguments
    changes: dict[str, Any] = {}
    if given.data_path is not None:
        changes["data"] = " ".join(given.data_path)
    if given.load is not None and given.save not in (None, given.load):
        reason = f"a run continues in its own folder, and --save is {given.save!r}"
        raise ConfigError("--load", given.load, reason, "Give both the same folder")
    if given.load is not None and (Path(given.load) / _MEGATRON_LATEST).is_file():
        reason = "it holds a checkpoint of Megatron"
        remedy = f"Use wavemare convert {given.load} FOLDER --to hf, and train gpt/finetune"
        raise ConfigError("--load", given.load, reason, remedy)
    if given.save or given.load:
        changes["output"] = given.save or given.load
    # As in Megatron, the run starts from the beginning where there is no checkpoint.
    if given.load is not None and (Path(given.load) / "checkpoints" / "latest").is_file():
        changes["resume"] = True
    if given.eval_iters == 0:
        changes["eval_interval"] = sys.maxsize
    if isinstance(given, TokenizerArguments):
        changes |= _tokenizer_folder(given)
    return replace(arguments, **changes)


def _tokenizer_folder(given: TokenizerArguments) -> dict[str, str]:
    kind = given.tokenizer_type
    if kind is not None and kind not in _TOKENIZERS:
        reason = "tokenizers are read from Hugging Face folders"
        raise ConfigError("--tokenizer-type", kind, reason, f"Use one of {', '.join(_TOKENIZERS)}")
    files = [file for file in (given.vocab_file, given.merge_file) if file is not None]
    folders = {str(Path(file).parent) for file in files}
    if len(folders) > 1:
        reason = "vocabulary and merges are in different folders"
        raise ConfigError("--merge-file", given.merge_file, reason, "Put them into one")
    return {"tokenizer": folders.pop()} if folders else {}
