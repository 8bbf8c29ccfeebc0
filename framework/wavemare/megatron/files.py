# SPDX-License-Identifier: Apache-2.0
"""Megatron's legacy checkpoint folders: ``iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt``."""

from __future__ import annotations

import argparse
import io
import os
import re
import types
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.engine.checkpoint.files import GETATTR, Foreign, enum_member
from wavemare.errors import CheckpointError, ModelError
from wavemare.files import (
    atomic_write_text,
    remove_leftovers,
    replace_folder,
    temporary_sibling,
)

LATEST = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
_FOR_HEAD = "word_embeddings_for_head.weight"
_LANGUAGE_MODEL = ("embedding", "encoder", "pooler", "output_layer")
_SAID = 200  # characters
_NAMED_ANEW = 3  # the version from which a layer's parts have their names of today
# Megatron's dictionaries hold the arguments and the state of random generators besides weights.
_SAFE: list[Any] = [
    argparse.Namespace,
    io.BytesIO,
    types.SimpleNamespace,
    np.ndarray,
    np.dtype,
    np.ndarray.__reduce__(np.empty(0))[0],  # numpy's own way to rebuild one
    *(type(np.dtype(name)) for name in ("u4", "i8", "f8", "u1", "i4", "u8")),
]


@dataclass
class Checkpoint:
    """A checkpoint as it stands in its files.

    Attributes:
        stages: Weights by pipeline stage and tensor-parallel rank; names of today, layers counted
            from the stage's first, order and share those of the file.
        version: ``checkpoint_version``.
        arguments: Megatron's arguments, as far as the files have them.
    """

    stages: list[list[dict[str, Tensor]]]
    version: int
    arguments: dict[str, Any]

    @property
    def shares(self) -> list[dict[str, Tensor]]:
        """The weights of each tensor-parallel rank, all stages together."""
        merged: list[dict[str, Tensor]] = [{} for _ in self.stages[0]]
        first = 0
        for stage in self.stages:
            count = 0
            for share, weights in zip(merged, stage, strict=True):
                numbers = [_layer_number(name) for name in weights]
                count = max((n + 1 for n in numbers if n is not None), default=0)
                for name, weight in weights.items():
                    if name != _FOR_HEAD:
                        share[_renumbered(name, first)] = weight
            first += count
        return merged


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the newest checkpoint of a folder, or the one that the path names.

    Nothing but tensors, numbers, texts and Megatron's arguments is unpickled. Arguments that are
    objects of Megatron's own classes come without a value.

    Raises:
        CheckpointError: There is none, a rank's file is missing or damaged, or it is of another
            format, version or layout.
    """
    step = _find_step(Path(os.path.expanduser(folder)))
    files = _rank_files(step)
    tensor_ranks = 1 + max(t for t, _ in files)
    stages = 1 + max(p for _, p in files)
    missing = [(t, p) for p in range(stages) for t in range(tensor_ranks) if (t, p) not in files]
    if missing:
        reason = f"the file of tensor rank {missing[0][0]} and stage {missing[0][1]} is missing"
        raise CheckpointError("checkpoint", str(step), reason, "Copy all of its ranks")
    loaded = {place: _load(path) for place, path in files.items()}
    weights = [
        [_flat(loaded[t, p], files[t, p]) for t in range(tensor_ranks)] for p in range(stages)
    ]
    first, path = loaded[0, 0], files[0, 0]
    arguments = getattr(first.get("args"), "__dict__", {})
    given = first.get("checkpoint_version", 0)  # before there was a version, its number was 0
    if not isinstance(given, int | float) or given not in range(_NAMED_ANEW + 1):
        reason = f"its checkpoint_version is {given!r} where 0 to {_NAMED_ANEW} are known"
        raise CheckpointError("checkpoint", str(path), reason, "Let Megatron save it anew")
    return Checkpoint(weights, int(given), dict(arguments))


def write_checkpoint(
    folder: str | Path,
    shares: Sequence[Mapping[str, Tensor]],
    *,
    num_layers: int,
    stages: int,
    version: int,
    arguments: Mapping[str, Any],
    iteration: int,
) -> Path:
    """Write a checkpoint; its folder and then the note of the newest appear at the end.

    Args:
        folder: What Megatron's ``--load`` would be.
        shares: The weights of each tensor-parallel rank.
        num_layers: Transformer layers.
        stages: Pipeline stages.
        version: ``checkpoint_version``.
        arguments: Megatron's arguments.
        iteration: Steps that were trained; 0 writes a ``release``.

    Raises:
        ModelError: The layers cannot be divided by the stages.
    """
    if num_layers % stages:
        reason = f"{num_layers} layers cannot be shared by {stages} stages"
        raise ModelError("--pipeline-parallel", stages, reason, "Give a divisor")
    folder = Path(os.path.expanduser(folder))
    folder.mkdir(parents=True, exist_ok=True)
    name = f"iter_{iteration:07}" if iteration else "release"
    remove_leftovers(folder)
    partial = temporary_sibling(folder / name)
    for stage in range(stages):
        for rank, share in enumerate(shares):
            rank_name = f"mp_rank_{rank:02}" + (f"_{stage:03}" if stages > 1 else "")
            (partial / rank_name).mkdir(parents=True)
            own = _stage_weights(share, num_layers // stages, stage, stages)
            content = {
                "args": argparse.Namespace(**arguments),
                "checkpoint_version": float(version),
                "iteration": iteration,
                "model": _nested(own, version),
            }
            torch.save(content, partial / rank_name / _FILE)
    replace_folder(partial, folder / name)
    atomic_write_text(folder / LATEST, str(iteration) if iteration else "release")
    return folder / name


def said_by(error: Exception) -> str:
    """Return what another library's error says, in one line; its name if it says nothing."""
    return " ".join(str(error).split())[:_SAID] or type(error).__name__


def _find_step(folder: Path) -> Path:
    remedy = "Name the folder that Megatron's --save names"
    if any(folder.glob("mp_rank_*")):
        return folder
    if not (folder / LATEST).is_file():
        raise CheckpointError("checkpoint", str(folder), f"there is no file {LATEST}", remedy)
    text = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()[:80]
    if text != "release" and not re.fullmatch("[0-9]{1,18}", text):
        reason = f"{LATEST} says {text!r} where a number or 'release' is expected"
        raise CheckpointError("checkpoint", str(folder), reason, remedy)
    step = folder / ("release" if text == "release" else f"iter_{int(text):07}")
    if (step / ".metadata").exists() or (step / "metadata.json").exists():
        reason = "it is a distributed checkpoint (torch_dist), which Megatron-core alone reads"
        remedy = "Let Megatron save it with --ckpt-format torch"
        raise CheckpointError("checkpoint", str(step), reason, remedy)
    return step


def _rank_files(step: Path) -> dict[tuple[int, int], Path]:
    files = {}
    for path in sorted(step.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match and (path / _FILE).is_file():
            files[int(match[1]), int(match[2] or 0)] = path / _FILE
    if not files:
        reason = f"there is no mp_rank_*/{_FILE}"
        raise CheckpointError("checkpoint", str(step), reason, "Copy all of its ranks")
    return files


def _load(path: Path) -> dict[str, Any]:
    unknown: set[str] = set()
    try:
        # A file of the format before zip has no list; what it holds besides weights is refused.
        if zipfile.is_zipfile(path):
            with torch.serialization.safe_globals([*_SAFE, (enum_member, GETATTR)]):
                unknown |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        # Above all args.model_type, an enumeration, which training sets.
        foreign = [(Foreign, name) for name in unknown if name.startswith("megatron.")]
        unknown -= {name for _, name in foreign}
        with torch.serialization.safe_globals([*_SAFE, *foreign, (enum_member, GETATTR)]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have errors of their own
        detail = f"it holds {', '.join(sorted(unknown))}" if unknown else said_by(error)
        reason = f"the file cannot be read safely ({detail})"
        remedy = "Save the checkpoint anew with weights and plain arguments alone"
        raise CheckpointError("checkpoint", str(path), reason, remedy) from error
    if not isinstance(loaded, Mapping) or not isinstance(loaded.get("model"), Mapping):
        interleaved = isinstance(loaded, Mapping) and "model0" in loaded
        reason = "it has interleaved stages" if interleaved else "it holds no model"
        remedy = "Save it without --num-layers-per-virtual-pipeline-stage"
        raise CheckpointError("checkpoint", str(path), reason, remedy)
    return dict(loaded)


def _flat(loaded: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights of a file by their names of today."""
    weights: dict[str, Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Tensor):
            weights[_today(prefix)] = value
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)

    model = dict(loaded["model"])
    walk("", model.pop("language_model", {}))
    walk("", model)
    for mark, layers, options in (
        (r"decoder\.", "Megatron-core", "--use-legacy-models"),
        (r".*(\.layernorm_|_extra_state$)", "Transformer Engine", "--transformer-impl local"),
    ):
        if any(re.match(mark, name) for name in weights):
            reason, remedy = f"its layers are those of {layers}", f"Save it with {options}"
            raise CheckpointError("checkpoint", str(path), reason, remedy)
    if not weights:
        reason = "its model has no language_model"
        raise CheckpointError("checkpoint", str(path), reason, "Give a GPT or BERT checkpoint")
    return weights


def _today(name: str) -> str:
    name = re.sub(r"^transformer\.", "encoder.", name)
    name = re.sub(r"(layers\.\d+)\.attention\.", r"\1.self_attention.", name)
    return re.sub(r"(input|post_attention|final)_norm\.", r"\1_layernorm.", name)


def _nested(weights: Mapping[str, Tensor], version: int) -> dict[str, Any]:
    """Return a file's ``model``, the inverse of `_flat`."""
    old = version < _NAMED_ANEW
    model: dict[str, Any] = {"language_model": {}}
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        at = model["language_model"] if part in _LANGUAGE_MODEL else model
        if part == "encoder" and old:
            part, rest = "transformer", rest.replace(".self_attention.", ".attention.")
        at = at.setdefault(part, {})
        if part == "embedding":
            inner, _, rest = rest.partition(".")
            at = at.setdefault(inner, {})
        at[rest] = weight
    return model


def _stage_weights(
    share: Mapping[str, Tensor], layers: int, stage: int, stages: int
) -> dict[str, Tensor]:
    first, last = stage == 0, stage == stages - 1
    own = {}
    for name, weight in share.items():
        number = _layer_number(name)
        if number is not None:
            if number // layers == stage:
                own[_renumbered(name, -stage * layers)] = weight
        elif first if name.startswith("embedding.") else last:
            own[name] = weight
    if last and not first and "output_layer.weight" not in share:
        own[_FOR_HEAD] = share["embedding.word_embeddings.weight"]
    return own


def _layer_number(name: str) -> int | None:
    match = re.match(r"encoder\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def _renumbered(name: str, by: int) -> str:
    return re.sub(
        r"^(encoder\.layers\.)(\d+)", lambda match: f"{match[1]}{int(match[2]) + by}", name
    )
