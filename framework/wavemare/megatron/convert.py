# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from one format to another, each conversion proved by the logits of both sides."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from wavemare.errors import ModelError, did_you_mean
from wavemare.megatron.files import LATEST, read_checkpoint, write_checkpoint
from wavemare.megatron.models import (
    arguments_of,
    check_arguments,
    config_of,
    load_model,
    model_of,
    shape_of,
)
from wavemare.megatron.pipeline_files import read_pipeline, write_pipeline
from wavemare.megatron.reference import megatron_logits
from wavemare.megatron.weights import (
    EMBEDDING,
    HEAD,
    Shape,
    from_transformers,
    merge,
    needed,
    pad_vocabulary,
    size_of,
    split,
    to_transformers,
)

__all__ = ["Conversion", "Format", "Options", "convert", "format_of"]

Format = Literal["hf", "megatron", "deepspeed"]

_FORMATS = ("hf", "megatron", "deepspeed")
_USED = {
    "from megatron": ("vocab_size", "num_attention_heads", "model_type"),
    "from deepspeed": ("config",),
    "to megatron": ("tensor_parallel", "pipeline_parallel", "version", "divisible_by", "iteration"),
    "to deepspeed": ("pipeline_parallel",),
}
_NAMES = {"version": "checkpoint_version", "divisible_by": "make_vocab_size_divisible_by"}
_TOLERANCE = 1e-3  # of the largest logit: fp32 differs by 1e-6, a wrong order by 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a target or a source does not say by itself.

    Attributes:
        tensor_parallel: Ranks that share a layer of a Megatron target.
        pipeline_parallel: Stages of a Megatron or DeepSpeed target.
        version: ``checkpoint_version`` of a Megatron target, 0 to 3.
        divisible_by: A Megatron target's vocabulary is padded to a multiple of this, times the
            tensor-parallel ranks.
        iteration: Of a Megatron target; 0 is a release.
        vocab_size: Tokens of a Megatron source without padding.
        num_attention_heads: Of a Megatron source that does not say it.
        model_type: What a Megatron source shall become.
        config: Folder of ``config.json`` of a DeepSpeed source without one.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    version: int = 3
    divisible_by: int = 128
    iteration: int = 0
    vocab_size: int | None = None
    num_attention_heads: int | None = None
    model_type: str | None = None
    config: str | None = None


@dataclass(frozen=True)
class Conversion:
    """What was done.

    Attributes:
        source: Format that was read.
        target: Format that was written.
        parameters: Numbers in the model.
        difference: Largest difference of a logit between both sides, in fp32.
        largest: Largest logit.
    """

    source: Format
    target: str
    parameters: int
    difference: float
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.source} to {self.target}: {self.parameters:,} parameters, logits differ by at "
            f"most {self.difference:.3g} (the largest is {self.largest:.3g})"
        )


@dataclass(frozen=True)
class _Source:
    """A model that was read, and what its files themselves compute."""

    model: Any
    logits: Callable[[Tensor], Tensor]


def convert(
    source: str | Path, target: str | Path, to: str, options: Options | None = None
) -> Conversion:
    """Convert a checkpoint and compare what both sides compute before the target appears.

    Args:
        source: A Hugging Face folder, what Megatron's ``--load`` names, or what DeepSpeed's
            ``load_checkpoint`` is given.
        target: A folder that does not exist, or is empty.
        to: Its format: hf, megatron or deepspeed.
        options: See `Options`.

    Raises:
        ModelError: There is no faithful conversion, an option says nothing of these formats, the
            target cannot be made, or the logits of both sides differ.
        CheckpointError: The source is missing or damaged.
    """
    options = options or Options()
    target = Path(os.path.expanduser(target)).resolve()
    _check(target, to, options)
    kind = format_of(source)
    _check_used(kind, to, options)
    read = _READERS[kind](Path(os.path.expanduser(source)), options)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ModelError("TARGET", str(target), str(error), "Choose another place") from error
    try:
        _WRITERS[to](written, read.model, options)
        # Read back from what was written, not from what was meant to be.
        back = _READERS[to](written, _for_reading_back(read.model, options))
        result = _compare(kind, to, read, back)
        if target.exists():
            target.rmdir()
        written.chmod(0o755)
        written.rename(target)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return result


def format_of(folder: str | Path) -> Format:
    """Tell a folder's format by the names in it.

    Raises:
        ModelError: It is none that is known.
    """
    path = Path(os.path.expanduser(folder))
    if (path / LATEST).is_file() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return "megatron"
    if (path / "latest").is_file():
        return "deepspeed"
    if (path / "config.json").is_file():
        return "hf"
    reason = f"it has neither config.json nor {LATEST} nor latest"
    raise ModelError("SOURCE", str(folder), reason, "Name the folder of a checkpoint")


def _check(target: Path, to: str, options: Options) -> None:
    if to not in _FORMATS:
        raise ModelError("--to", to, "there is no such format", did_you_mean(to, _FORMATS))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError("TARGET", str(target), "it exists", "Choose another name")
    if options.version not in range(4):
        reason = "there are versions 0 to 3"
        raise ModelError("--checkpoint-version", options.version, reason, "Give one of these")


def _check_used(source: str, target: str, options: Options) -> None:
    used = {name for end in (f"from {source}", f"to {target}") for name in _USED.get(end, ())}
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name not in used and value != option.default:
            name = "--" + _NAMES.get(option.name, option.name).replace("_", "-")
            reason = f"it has no effect from {source} to {target}"
            raise ModelError(name, value, reason, "Leave it out")


def _for_reading_back(model: Any, options: Options) -> Options:
    return Options(vocab_size=model.config.vocab_size, model_type=options.model_type)


def _read_hf(folder: Path, options: Options) -> _Source:
    model = load_model(folder)
    return _Source(model, lambda ids: _logits(model, ids))


def _read_megatron(folder: Path, options: Options) -> _Source:
    checkpoint = read_checkpoint(folder)
    if options.num_attention_heads is not None:
        checkpoint.arguments["num_attention_heads"] = options.num_attention_heads
    shares = checkpoint.shares
    size = size_of(shares[0])
    check_arguments(checkpoint.arguments, size["hidden_size"], len(shares))
    heads = int(checkpoint.arguments.get("num_attention_heads") or 0)
    family = "megatron-bert" if "lm_head.dense.weight" in shares[0] else "gpt2"
    padded = sum(len(needed(share, EMBEDDING)) for share in shares)
    rough = Shape(family, size["num_layers"], heads or len(shares), padded)
    whole = merge(shares, rough, checkpoint.version)
    config = config_of(
        checkpoint.arguments,
        whole,
        vocab_size=options.vocab_size,
        model_type=options.model_type,
    )
    tokens = config.vocab_size
    for name in (EMBEDDING, HEAD, "lm_head.bias"):
        if name in whole:
            whole[name] = whole[name][:tokens].clone()
    state = to_transformers(whole, shape_of(config))
    model = model_of(config, state)
    return _Source(model, lambda ids: megatron_logits(checkpoint, ids)[..., :tokens])


def _read_deepspeed(folder: Path, options: Options) -> _Source:
    import transformers

    place = Path(os.path.expanduser(options.config)) if options.config else folder
    try:
        config: Any = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = "its files do not say what model it is"
        remedy = "Name a folder with the model's config.json by --config"
        raise ModelError("SOURCE", str(folder), reason, remedy) from error
    model = model_of(config, read_pipeline(folder, config))
    return _Source(model, lambda ids: _logits(model, ids))


def _write_hf(folder: Path, model: Any, options: Options) -> None:
    model.save_pretrained(folder)


def _write_megatron(folder: Path, model: Any, options: Options) -> None:
    shape = shape_of(model.config)
    tied = bool(model.config.tie_word_embeddings)
    whole = from_transformers(model.state_dict(), shape, tied=tied)
    multiple = options.divisible_by * options.tensor_parallel
    rows = math.ceil(shape.vocab_size / multiple) * multiple
    padded = pad_vocabulary(whole, rows)
    write_checkpoint(
        folder,
        split(padded, shape, options.tensor_parallel, options.version),
        num_layers=shape.layers,
        stages=options.pipeline_parallel,
        version=options.version,
        arguments={
            **arguments_of(model.config, rows),
            "tensor_model_parallel_size": options.tensor_parallel,
            "pipeline_model_parallel_size": options.pipeline_parallel,
            "make_vocab_size_divisible_by": options.divisible_by,
        },
        iteration=options.iteration,
    )


def _write_deepspeed(folder: Path, model: Any, options: Options) -> None:
    write_pipeline(folder, model, stages=options.pipeline_parallel)


_READERS = {"hf": _read_hf, "megatron": _read_megatron, "deepspeed": _read_deepspeed}
_WRITERS = {"hf": _write_hf, "megatron": _write_megatron, "deepspeed": _write_deepspeed}


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    held = next(model.parameters()).dtype
    output = model.float()(ids)
    model.to(held)  # exact: each number came from there
    logits: Tensor = output["logits" if "logits" in output else "prediction_logits"]
    return logits


def _compare(source: Format, target: str, read: _Source, back: _Source) -> Conversion:
    config = read.model.config
    length = min(64, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, length), generator=generator)
    expected, found = read.logits(ids), back.logits(ids)
    difference = float((expected - found).abs().max())
    largest = float(expected.abs().max())
    count = sum(parameter.numel() for parameter in read.model.parameters())
    result = Conversion(source, target, count, difference, largest)
    if not difference <= _TOLERANCE * max(largest, 1.0):
        reason = "the logits of both sides differ, so the conversion was dropped"
        raise ModelError("conversion", str(result), reason, "Report it with the model's arguments")
    return result
