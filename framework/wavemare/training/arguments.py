# SPDX-License-Identifier: Apache-2.0
"""Options that recipes share, in DeepSpeed's, Hugging Face's and Megatron's spellings."""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from wavemare.engine.launch.group import environment_rank
from wavemare.engine.observe.choices import tell
from wavemare.errors import CheckpointError, ConfigError
from wavemare.files import read_json
from wavemare.training import megatron
from wavemare.training.megatron import TABLE, MegatronArguments

_LARGEST_SEED = 2**32 - 2  # models are seeded by it, and their dropout by the next one
_SPELLINGS = {
    "--train_iters": "--max_steps",
    "--seq_length": "--sequence_length",
    "--max_length": "--sequence_length",
    "--learning_rate": "--lr",
    "--per_device_train_batch_size": "--micro_batch_size",
}
"""Others' names of options that have another name here; dashes may be underscores."""
_AT_LEAST_0 = {"trace_steps", "lr_warmup_iters", "lr_warmup_samples", "eval_iters"}
"""Whole numbers that may be 0."""
ALL = "all"
"""The word for all samples."""
_VOCABULARY = 4096
_OF_A_NEW_MODEL = (
    *(row.attribute for row in megatron.of_use(megatron.MODEL)),
    "make_vocab_size_divisible_by",
    "model_config",
)


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainArguments(MegatronArguments):
    """Options of every recipe."""

    megatron_checkpoints: ClassVar[bool] = False
    """Whether the recipe's model continues text, so that Megatron's checkpoints can hold it."""
    rows_per_sample: ClassVar[int] = 1
    """Rows of the sequence length in a sample."""

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
        """Return the options that have a value; of Megatron's flags the given ones."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and not (value is False and name in TABLE)
        }


@dataclass(frozen=True)
class ModelArguments:
    """Options of a new model."""

    model_config: str = option("", "transformers configuration of a new model")
    vocab_size: int | None = option(None, f"tokens of the trained BPE; {_VOCABULARY} if omitted")
    make_vocab_size_divisible_by: int | None = option(
        None, "pad the vocabulary to a multiple of this times the tensor-parallel size"
    )

    @property
    def trained_vocabulary(self) -> int:
        """Number of tokens of a tokenizer that is trained."""
        return self.vocab_size or _VOCABULARY

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
    tokenizer_model: str | None = option(
        None, "Megatron's: the folder of --tokenizer, or a file in it"
    )
    tokenizer_type: str | None = option(
        None, f"Megatron's: one of {', '.join(megatron.TOKENIZERS)}"
    )
    vocab_file: str | None = option(None, "Megatron's: a file in the folder of --tokenizer")
    merge_file: str | None = option(None, "Megatron's: a file in the folder of --tokenizer")


Arguments = TypeVar("Arguments", bound=TrainArguments)


@dataclass(frozen=True)
class ChatArguments(TokenizerArguments, TrainArguments):
    """Options of recipes that tune a causal model on chats, with LoRA or without."""

    long_rows: str = option("cut", "what becomes of too long rows: cut, or skip to leave them out")
    chat_template: str | None = option(None, "file in place of the tokenizer's chat template")
    chat_template_kwargs: str | None = option(None, "JSON that the template is given")
    lora_r: int | None = option(None, "rank of LoRA; all weights are trained if omitted")
    lora_alpha: int = option(32, "LoRA's alpha: adapters are scaled by alpha / rank")
    lora_targets: str = option("all-linear", "names of the adapted layers, with commas between")
    merge: bool = option(False, "export a full model, with LoRA's weights merged")


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
        remedy = _nearest(name, kind)
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


def _nearest(name: str, kind: type[TrainArguments]) -> str:
    """Return what an option that does not exist may have meant; first what has a meaning here."""
    dash = "-" if "-" in name else "_"
    shown = [f.name for f in fields(kind) if f.metadata.get("help") != argparse.SUPPRESS]
    shown += [spelling.lstrip("-") for spelling in _SPELLINGS]
    for names in (shown, TABLE):
        near = get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.6)
        if near:
            return f"Did you mean {near[0].replace('_', dash)!r}?"
    return "See all options with --help"


def _refuse_idle(given: ModelArguments) -> None:
    """Refuse options of a new model and a new tokenizer where these come from folders.

    Raises:
        ConfigError: Such an option is given.
    """
    model, tokenizer = (getattr(given, name, None) for name in ("model", "tokenizer"))
    for folder, names, reason in (
        (model, _OF_A_NEW_MODEL, "the model comes from a folder, with its own configuration"),
        (
            None if given_start(given) else model or tokenizer,
            ("vocab_size",),
            "the tokenizer comes from a folder, with its tokens",
        ),
    ):
        for each in fields(given):
            value = getattr(given, each.name)
            if folder is not None and each.name in names and value != each.default:
                raise ConfigError(f"--{each.name}", value, reason, "Leave it out")


def given_start(given: Any) -> str | None:
    """Return Megatron's checkpoint that a run starts from, if any."""
    return getattr(given, "pretrained_checkpoint", None)


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
    if idle := megatron.check(given):
        tell(f"No meaning here (docs/megatron-options.md): {', '.join(idle)}")
    changes: dict[str, Any] = _steps_of_samples(given)
    if given.data_path is not None:
        changes["data"] = " ".join(given.data_path)
    changes |= _start_of(given)
    if given.eval_iters == 0:
        changes["eval_interval"] = sys.maxsize
    if isinstance(given, TokenizerArguments):
        changes |= _tokenizer_folder(given)
    resolved = replace(arguments, **changes)
    for name in ("pretrained_checkpoint", "save_megatron"):
        if (folder := getattr(resolved, name)) is not None and not resolved.megatron_checkpoints:
            reason = "this recipe trains another kind of model than Megatron's checkpoints hold"
            key = "--load" if folder == given.load else f"--{TABLE[name].name}"
            raise ConfigError(key, folder, reason, "Leave it out, or train gpt or llama")
    return resolved


def _steps_of_samples(given: Any) -> dict[str, int]:
    """Return the numbers of steps that are given as numbers of samples.

    Raises:
        ConfigError: The samples of a step are not given, or a number is given twice.
    """
    found: dict[str, int] = {}
    default = {each.name: each.default for each in fields(given)}["max_steps"]
    for name, steps, unset in (
        ("train_samples", "max_steps", default),
        ("lr_warmup_samples", "lr_warmup_iters", None),
        ("lr_decay_samples", "lr_decay_iters", None),
    ):
        samples = getattr(given, name)
        if samples is None:
            continue
        key, same = f"--{TABLE[name].name}", f"--{steps.replace('_', '-')}"
        if getattr(given, steps) != unset:
            raise ConfigError(key, samples, f"{same} says the same", "Give one of the two")
        if given.global_batch_size is None:
            reason = "the samples of a step are not given"
            raise ConfigError(key, samples, reason, "Give --global-batch-size")
        found[steps] = samples // given.global_batch_size
    if found.get("max_steps") == 0:
        reason = f"one step takes {given.global_batch_size}"
        raise ConfigError("--train-samples", given.train_samples, reason, "Give more")
    return found


def is_megatron(folder: str | Path) -> bool:
    """Whether a folder is what Megatron's ``--load`` names, or one iteration in it."""
    path = Path(folder).expanduser()
    names = ("latest_checkpointed_iteration.txt", "metadata.json", ".metadata")
    return any((path / name).is_file() for name in names) or any(path.glob("mp_rank_*"))


def _start_of(given: Any) -> dict[str, Any]:
    """Return the run folder, whether the run goes on, and the checkpoint that it starts from.

    Raises:
        ConfigError: Options contradict each other.
        CheckpointError: There is no checkpoint where one has to be.
    """
    load, save, before = given.load, given.save, given.pretrained_checkpoint
    own = load is not None and (Path(load) / "checkpoints" / "latest").is_file()
    theirs = load is not None and is_megatron(load)
    same = load is not None and (save is None or Path(save) == Path(load))
    if own and not theirs and not same:
        reason = f"a run continues in its own folder, and --save is {save!r}"
        raise ConfigError("--load", load, reason, "Give both the same folder")
    if own and same:
        for name in ("finetune", "no_load_optim"):
            if getattr(given, name):
                reason = f"{load} is a run of wavemare, which goes on with all that it was"
                remedy = f"Leave it out, or train gpt/finetune --model {load}/model"
                raise ConfigError(f"--{TABLE[name].name}", True, reason, remedy)
        changes = _described_in(load, given) if given.use_checkpoint_args and not theirs else {}
        start = load if theirs else before
        return changes | {"output": load, "resume": True, "pretrained_checkpoint": start}
    if theirs:
        return {"pretrained_checkpoint": load} | ({} if save is None else {"output": save})
    # As in Megatron, the run starts from the beginning where there is no checkpoint.
    if load is not None and (given.exit_on_missing_checkpoint or not same):
        _check_checkpoint("--load", load)
    if before is not None:
        _check_checkpoint("--pretrained-checkpoint", before)
    elif given.use_checkpoint_args:
        _check_named(given)
    if load is not None and before is None:
        tell(f"There is no checkpoint in {load}: the run starts from the beginning")
    return {"output": save or load} if save or load else {}


def _check_named(given: Any) -> None:
    """Refuse ``--use-checkpoint-args`` without a checkpoint, unless ``--model`` names a folder.

    Raises:
        ConfigError: No model is named, or by default alone.
    """
    default = next((each.default for each in fields(given) if each.name == "model"), None)
    model, load = getattr(given, "model", None), given.load
    if model is None or (load is not None and model == default):
        reason = "no checkpoint is named" if load is None else f"there is no checkpoint in {load}"
        remedy = (
            "Leave it out and describe the model by its options, or name a checkpoint by --load"
        )
        raise ConfigError("--use-checkpoint-args", True, reason, remedy)


def _described_in(run: str, given: Any) -> dict[str, Any]:
    """Return the options that described the model of a run of wavemare."""
    key, file = "--use-checkpoint-args", Path(run) / "config.json"
    noted = read_json(file, CheckpointError, key, "Describe the model by its options")
    try:
        options = dict(noted["configuration"]["arguments"])
    except (KeyError, TypeError, ValueError):
        reason = "it does not say how the model was described"
        raise CheckpointError(key, str(file), reason, "Describe the model by its options") from None
    names = {each.name for each in fields(given)}.intersection((*_OF_A_NEW_MODEL, "vocab_size"))
    defaults = {each.name: each.default for each in fields(given)}
    return {name: options.get(name, defaults[name]) for name in names}


def _check_checkpoint(key: str, folder: str) -> None:
    if not is_megatron(folder):
        reason = "there is no checkpoint in it"
        raise CheckpointError(key, folder, reason, "Name the folder that Megatron's --save named")


def _tokenizer_folder(given: TokenizerArguments) -> dict[str, str]:
    kind = given.tokenizer_type
    if kind is not None and kind not in megatron.TOKENIZERS:
        reason = "tokenizers are read from Hugging Face folders"
        remedy = f"Use one of {', '.join(megatron.TOKENIZERS)}"
        raise ConfigError("--tokenizer-type", kind, reason, remedy)
    named = {
        "--vocab-file": given.vocab_file and Path(given.vocab_file).parent,
        "--merge-file": given.merge_file and Path(given.merge_file).parent,
        "--tokenizer-model": given.tokenizer_model and _folder_of(given.tokenizer_model),
    }
    folders = {key: str(folder) for key, folder in named.items() if folder}
    if len(set(folders.values())) > 1:
        key = [*folders][-1]
        value = getattr(given, key.strip("-").replace("-", "_"))
        reason = "the files of the tokenizer are in different folders"
        raise ConfigError(key, value, reason, "Put them into one")
    return {"tokenizer": next(iter(folders.values()))} if folders else {}


def _folder_of(path: str) -> Path:
    """Return the folder of a file, or the folder itself."""
    return Path(path).parent if Path(path).is_file() else Path(path)
