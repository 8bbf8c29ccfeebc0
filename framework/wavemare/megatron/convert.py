# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from one format to another; what was written is read back and compared."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from wavemare.errors import ModelError, did_you_mean, os_errors
from wavemare.megatron.files import LATEST, read_checkpoint, write_checkpoint
from wavemare.megatron.models import (
    arguments_of,
    check_arguments,
    config_of,
    load_model,
    model_of,
)
from wavemare.megatron.weights import (
    EMBEDDING,
    HEAD,
    from_transformers,
    merge,
    needed,
    pad_vocabulary,
    split,
    to_transformers,
)

_FORMATS = ("hf", "megatron")
_USED = {
    "from megatron": ("vocab_size", "num_attention_heads"),
    "to megatron": ("tensor_parallel", "pipeline_parallel", "version", "divisible_by", "iteration"),
}
_NAMES = {"version": "checkpoint_version", "divisible_by": "make_vocab_size_divisible_by"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a target or a source does not say by itself.

    Attributes:
        tensor_parallel: Ranks that share a layer of a Megatron target.
        pipeline_parallel: Stages of a Megatron target.
        version: ``checkpoint_version`` of a Megatron target, 0 to 3.
        divisible_by: A Megatron target's vocabulary is padded to a multiple of this, times the
            tensor-parallel ranks.
        iteration: Of a Megatron target; 0 is a release.
        vocab_size: Tokens of a Megatron source without padding.
        num_attention_heads: Of a Megatron source that does not say it.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    version: int = 3
    divisible_by: int = 128
    iteration: int = 0
    vocab_size: int | None = None
    num_attention_heads: int | None = None


def convert(source: str | Path, target: str | Path, to: str, options: Options | None = None) -> str:
    """Convert a checkpoint. The target appears once it has been read back without a difference.

    Args:
        source: A Hugging Face folder, or what Megatron's ``--load`` names.
        target: A folder that does not exist, or is empty.
        to: Its format: hf or megatron.
        options: See `Options`.

    Returns:
        What was done, in one line.

    Raises:
        ModelError: There is no faithful conversion, an option says nothing of these formats, or the
            target cannot be made.
        CheckpointError: The source is missing or damaged.
    """
    options = options or Options()
    target = Path(os.path.expanduser(target)).resolve()
    _check(target, to, options)
    kind = format_of(source)
    _check_used(kind, to, options)
    model = _read(kind, Path(os.path.expanduser(source)), options)
    with os_errors(ModelError, "TARGET", str(target), "it cannot be made", "Choose another place"):
        target.parent.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if to == "hf":
            model.save_pretrained(written)
        else:
            _write_megatron(written, model, options)
        found = _read(to, written, Options()).state_dict()
        for name, weight in model.state_dict().items():
            if name not in found or not torch.equal(weight, found[name]):
                reason = "it was read back with a difference, so the conversion was dropped"
                raise ModelError("weights", name, reason, "Report it with the model's arguments")
        if target.exists():
            target.rmdir()
        written.chmod(0o755)
        written.rename(target)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{kind} to {to}: {count:,} parameters, read back without a difference"


def format_of(folder: str | Path) -> str:
    """Tell a folder's format, hf or megatron, by the names in it.

    Raises:
        ModelError: It is none that is known.
    """
    path = Path(os.path.expanduser(folder))
    if (path / LATEST).is_file() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return "megatron"
    if (path / "config.json").is_file():
        return "hf"
    reason, remedy = f"it has neither config.json nor {LATEST}", "Name the folder of a checkpoint"
    if (path / "latest").is_file():
        remedy = "Load an engine's checkpoint into the engine, and use wavemare.save_pretrained"
    raise ModelError("SOURCE", str(folder), reason, remedy)


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


def _read(kind: str, folder: Path, options: Options) -> Any:
    if kind == "hf":
        return load_model(folder)
    checkpoint = read_checkpoint(folder)
    if options.num_attention_heads is not None:
        checkpoint.arguments["num_attention_heads"] = options.num_attention_heads
    shares = checkpoint.shares
    hidden = needed(shares[0], EMBEDDING).shape[1]
    check_arguments(checkpoint.arguments, hidden, len(shares))
    heads = checkpoint.arguments["num_attention_heads"]
    whole = merge(shares, heads, checkpoint.version)
    config = config_of(checkpoint.arguments, whole, vocab_size=options.vocab_size)
    for name in (EMBEDDING, HEAD):
        if name in whole:
            whole[name] = whole[name][: config.vocab_size].clone()
    return model_of(config, to_transformers(whole, heads))


def _write_megatron(folder: Path, model: Any, options: Options) -> None:
    config = model.config
    multiple = options.divisible_by * options.tensor_parallel
    rows = math.ceil(config.vocab_size / multiple) * multiple
    arguments = {
        **arguments_of(config, rows),
        "tensor_model_parallel_size": options.tensor_parallel,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "make_vocab_size_divisible_by": options.divisible_by,
    }
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    tied = bool(config.tie_word_embeddings)
    padded = pad_vocabulary(from_transformers(model.state_dict(), layers, heads, tied=tied), rows)
    write_checkpoint(
        folder,
        split(padded, heads, options.tensor_parallel, options.version),
        num_layers=layers,
        stages=options.pipeline_parallel,
        version=options.version,
        arguments=arguments,
        iteration=options.iteration,
    )
