# SPDX-License-Identifier: Apache-2.0
"""Megatron's names of options: what each is called in a recipe, a model or DeepSpeed's JSON.

``translate`` takes Megatron's spellings out of a command line. Some are options of the recipe by
another name; the others change the model's configuration or the JSON, and are kept in `Changes`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavemare.engine.config.resolve import SECTION
from wavemare.errors import ConfigError

__all__ = ["NAMES", "Changes", "translate"]

RECIPE = {
    "train_iters": "max_steps",
    "seq_length": "sequence_length",
    "data_path": "data",
    "split": "split",
    "save_interval": "save_interval",
    "log_interval": "log_interval",
    "eval_interval": "eval_interval",
}
"""Options of a recipe, by Megatron's names."""

MODEL = {
    "num_layers": ("n_layer", "num_hidden_layers"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}
"""Keys of a model's configuration, GPT-2's and others', by Megatron's names."""

JSON: dict[str, tuple[str, ...]] = {
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
"""Keys of the JSON by Megatron's names; further ones take more than a key."""

_PADDED = "make_vocab_size_divisible_by"
_SCHEDULES = {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR"}
_TEXTS = {"tensorboard_dir", "wandb_project", "lr_decay_style"}
_WHOLE = {
    *MODEL,
    "micro_batch_size",
    "global_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    _PADDED,
    "eval_iters",
}
_FLAGS = {"fp16", "bf16", "deepspeed"}
_NUMBERS = {"min_lr", "lr_decay_style", "lr_warmup_fraction", _PADDED, "eval_iters"}
_SPECIAL = {
    "num_layers_per_virtual_pipeline_stage",
    "save",
    "load",
    "tokenizer_type",
    "vocab_file",
    "merge_file",
}
NAMES = frozenset({*RECIPE, *MODEL, *JSON, *_FLAGS, *_NUMBERS, *_SPECIAL})
"""All of Megatron's names that are understood, with underscores."""

_TOKENIZERS = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "BertWordPieceLowerCase")


@dataclass
class Changes:
    """What Megatron's options change beside the recipe's own.

    Attributes:
        given: Their values by name.
    """

    given: dict[str, Any] = field(default_factory=dict)

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse what would have no effect on a recipe with these options and values.

        Raises:
            ConfigError: The size of a model is given that comes from a folder.
        """
        sized = [name for name in (*MODEL, _PADDED) if name in self.given]
        if sized and ("model_config" not in options or options.get("model") is not None):
            option = "--" + sized[0].replace("_", "-")
            reason = "the model comes from a folder, with its own size"
            raise ConfigError(option, self.given[sized[0]], reason, "Leave it out")

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Change a DeepSpeed configuration, in place, and return it.

        Raises:
            ConfigError: An option does not go with the configuration.
        """
        given = self.given
        for name in JSON.keys() & given.keys():
            _put(config, JSON[name], given[name])
        for name in ("tensorboard", "wandb"):
            if any(key.startswith(name) for key in given):
                config[name]["enabled"] = True
        if given.keys() & {"micro_batch_size", "global_batch_size"}:
            config.pop("gradient_accumulation_steps", None)  # what follows from the two
        if "pipeline_model_parallel_size" in given:
            pipeline = config[SECTION]["pipeline"]
            if not isinstance(pipeline.get("partition", ""), str):
                del pipeline["partition"]  # cuts for another number of stages
        for name in ("fp16", "bf16"):
            if given.get(name):
                config[name] = {**config.get(name, {}), "enabled": True}
        self._schedule(config)
        return config

    def _schedule(self, config: dict[str, Any]) -> None:
        given = self.given
        if not given.keys() & {"min_lr", "lr_decay_style", "lr_warmup_fraction"}:
            return
        style = given.get("lr_decay_style", "cosine")
        rate = config.get("optimizer", {}).get("params", {}).get("lr")
        if not isinstance(rate, (int, float)) or rate <= 0:
            raise ConfigError("--lr", rate, "the schedule needs the highest rate", "Give --lr")
        params: dict[str, Any] = {"warmup_num_steps": "auto"}
        if style == "cosine":
            if given.get("min_lr", 0.0) > rate:
                reason = f"it is above the highest rate, {rate}"
                raise ConfigError("--min-lr", given["min_lr"], reason, "Give less than --lr")
            params["cos_min_ratio"] = given.get("min_lr", 0.0) / rate
        else:
            if given.get("min_lr"):
                reason = f"DeepSpeed's {_SCHEDULES[style]} has no lowest rate"
                raise ConfigError("--min-lr", given["min_lr"], reason, "Use the style cosine")
            params["warmup_max_lr"] = rate
        if style != "constant":
            params["total_num_steps"] = "auto"
        config["scheduler"] = {"type": _SCHEDULES[style], "params": params}

    def warmup_steps(self, steps: int) -> int:
        """Return the steps of warming up, a tenth of all if nothing else was asked for."""
        fraction = self.given.get("lr_warmup_fraction")
        return max(steps // 10 if fraction is None else round(steps * fraction), 1)

    def model(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a model's configuration with the sizes that were given."""
        place = 0 if values.get("model_type") == "gpt2" else 1
        sizes = {MODEL[name][place]: self.given[name] for name in MODEL.keys() & self.given.keys()}
        if place and "hidden_size" in sizes:
            sizes["intermediate_size"] = 4 * sizes["hidden_size"]
        return {**values, **sizes}

    def vocabulary(self, tokens: int) -> int:
        """Return the rows of an embedding for so many tokens, padded as asked."""
        ranks = self.given.get("tensor_model_parallel_size", 1)
        multiple = self.given.get(_PADDED)
        if multiple is None:
            return tokens
        return math.ceil(tokens / (multiple * ranks)) * multiple * ranks

    def evaluated(self, samples: int, batch: int) -> int:
        """Return the samples of an evaluation: ``eval_iters`` batches, if they were given."""
        iterations = self.given.get("eval_iters")
        return samples if iterations is None else iterations * batch


def translate(words: Sequence[str]) -> tuple[list[str], Changes]:
    """Take Megatron's options out of a command line.

    Args:
        words: The command line.

    Returns:
        It, with options of the recipe in their place, and the rest.

    Raises:
        ConfigError: A value is missing, of the wrong kind, or asks for what there is not.
    """
    kept: list[str] = []
    changes = Changes()
    special: dict[str, str] = {}
    left = deque(words)
    while left:
        word = left.popleft()
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in NAMES:
            kept.append(word)
        elif name in _FLAGS:
            changes.given[name] = True
        else:
            text = value if equals else _values(left, option, many=name == "data_path")
            if name in RECIPE:
                kept += [f"--{RECIPE[name]}", text]
            elif name in _SPECIAL:
                special[name] = text
            else:
                changes.given[name] = _value(option, name, text)
    changes.given.pop("deepspeed", None)  # as all recipes are
    return kept + _special(special), changes


def _values(left: deque[str], option: str, *, many: bool) -> str:
    """Take the words that belong to an option, a single one or all up to the next option."""
    words: list[str] = []
    while left and not left[0].startswith("--") and (many or not words):
        words.append(left.popleft())
    if not words:
        raise ConfigError(option, None, "its value is missing", "Give one")
    return " ".join(words)


def _value(option: str, name: str, text: str) -> Any:
    if name == "lr_decay_style" and text not in _SCHEDULES:
        reason = "there is no such style here"
        raise ConfigError(option, text, reason, f"Choose one of {', '.join(_SCHEDULES)}")
    if name in _TEXTS:
        return text
    kind: Callable[[str], float] = int if name in _WHOLE else float
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not (1 if name in _WHOLE else 0) <= number < math.inf:
        what = "a whole number above 0" if name in _WHOLE else "a number of 0 or more"
        raise ConfigError(option, text, f"it is not {what}", "Give one")
    if name == "lr_warmup_fraction" and number > 1:
        raise ConfigError(option, text, "it is a part of all steps", "Give 0 to 1")
    return number


def _special(special: dict[str, str]) -> list[str]:
    words: list[str] = []
    if "num_layers_per_virtual_pipeline_stage" in special:
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage",
            special["num_layers_per_virtual_pipeline_stage"],
            "a rank holds one stage; there is no interleaved schedule",
            "Leave it out; against the bubble there are pipemare and wavelet",
        )
    kind = special.get("tokenizer_type")
    if kind is not None and kind not in _TOKENIZERS:
        reason = "tokenizers are read from Hugging Face folders"
        raise ConfigError("--tokenizer-type", kind, reason, f"Use one of {', '.join(_TOKENIZERS)}")
    folders = {str(Path(special[n]).parent) for n in ("vocab_file", "merge_file") if n in special}
    if len(folders) > 1:
        reason = "vocabulary and merges stand in different folders"
        raise ConfigError("--merge-file", special["merge_file"], reason, "Put them into one")
    words += [word for folder in folders for word in ("--tokenizer", folder)]
    save, load = special.get("save"), special.get("load")
    if load is not None and save not in (None, load):
        reason = f"a run goes on in its own folder, and --save is {save!r}"
        raise ConfigError("--load", load, reason, "Give both the same folder")
    folder = save or load
    if folder is not None:
        words += ["--output", folder]
    # As Megatron: without a checkpoint there, the run begins.
    if load is not None and (Path(load) / "checkpoints" / "latest").is_file():
        words.append("--resume")
    return words


def _put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, key = path
    for parent in parents:
        config = config.setdefault(parent, {})
    config[key] = value
