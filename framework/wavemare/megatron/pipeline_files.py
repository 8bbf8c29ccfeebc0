# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's pipeline checkpoints: a file for each layer that `wavemare.to_pipeline` makes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import CheckpointError
from wavemare.files import (
    atomic_write_text,
    remove_leftovers,
    replace_folder,
    temporary_sibling,
)
from wavemare.megatron.files import said_by
from wavemare.models.families import family_of
from wavemare.models.layers import PipelineLayer, name_weights

__all__ = ["read_pipeline", "write_pipeline"]

_LATEST = "latest"
_TAG = "converted"


def write_pipeline(folder: str | Path, model: Any, *, stages: int) -> Path:
    """Write a model as a checkpoint that any engine over its pipeline loads the weights of.

    ``config.json`` is put beside it, so that it can be read without the model.

    Args:
        folder: What ``load_checkpoint`` is given.
        model: A model of transformers that can become a pipeline.
        stages: Ranks of a pipeline, each of which looks for a file of its own.
    """
    folder = Path(os.path.expanduser(folder))
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    partial = temporary_sibling(folder / _TAG)
    partial.mkdir()
    for number, layer in enumerate(_chain(model)):
        state = {name: weight.detach().clone() for name, weight in layer.state_dict().items()}
        torch.save(state, partial / f"layer_{number:02}-model_states.pt")
    for rank in range(stages):
        state = {"module": None, "dp_world_size": 1, "mp_world_size": stages}
        nothing_trained = {"global_steps": 0, "global_samples": 0, "skipped_steps": 0}
        torch.save({**state, **nothing_trained}, partial / f"mp_rank_{rank:02}_model_states.pt")
    model.config.save_pretrained(folder)
    replace_folder(partial, folder / _TAG)
    atomic_write_text(folder / _LATEST, _TAG)
    return folder / _TAG


def read_pipeline(folder: str | Path, config: Any) -> dict[str, Tensor]:
    """Read the weights of the newest checkpoint as the state dict of the whole model.

    Args:
        folder: What ``save_checkpoint`` was given.
        config: The model's configuration.

    Raises:
        CheckpointError: There is none, a layer is missing or damaged, or the layers are not those
            of the model, or split over ranks.
    """
    from wavemare.megatron.models import class_of

    folder = Path(os.path.expanduser(folder))
    if not (folder / _LATEST).is_file():
        reason = f"there is no file {_LATEST}"
        raise CheckpointError("checkpoint", str(folder), reason, "Name what save_checkpoint named")
    tag = (folder / _LATEST).read_text(encoding="utf-8", errors="replace").strip()
    step = folder / tag
    if not tag or "\0" in tag or not step.is_dir():
        reason = f"{_LATEST} says {tag[:80]!r}, and there is no such folder"
        raise CheckpointError("checkpoint", str(folder), reason, "Copy all of its files")
    files = {
        int(match[1]): path
        for path in step.glob("layer_*-model_states.pt")
        if (match := re.fullmatch(r"layer_(\d+)-(?:model_00-)?model_states\.pt", path.name))
    }
    if any(step.glob("layer_*-model_01-model_states.pt")):
        reason = "its layers are split over ranks"
        remedy = "Export it with wavemare.save_pretrained, and convert that"
        raise CheckpointError("checkpoint", str(step), reason, remedy)
    with torch.device("meta"):
        model = class_of(config)(config)
    chain = _chain(model)
    state: dict[str, Tensor] = {}
    for number, layer in enumerate(chain):
        expected = layer.state_dict()
        if number not in files and expected:
            raise CheckpointError(
                "checkpoint", str(step), f"layer {number} is missing", "Copy all of its files"
            )
        if expected:
            state |= _named(files[number], layer, expected)
    # Names that are tied share one tensor.
    held = name_weights(model, chain, dict(family_of(model).spares(model)))
    return {name: state[source] for name, source in held.items()}


def _named(path: Path, layer: PipelineLayer, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have errors of their own
        reason = f"the file cannot be read safely ({said_by(error)})"
        raise CheckpointError("checkpoint", str(path), reason, "Copy it again") from error
    if not isinstance(found, Mapping):
        reason = f"it holds a {type(found).__name__}, no weights"
        raise CheckpointError("checkpoint", str(path), reason, "Copy it again")
    wrong = {n for n in expected if n not in found or found[n].shape != expected[n].shape}
    if wrong or found.keys() - expected.keys():
        names = ", ".join(sorted(wrong | (found.keys() - expected.keys()))[:5])
        reason = f"its weights are not those of {type(layer).__name__} in this model ({names})"
        raise CheckpointError("checkpoint", str(path), reason, "Give the model's configuration")
    return {layer.weight_names[name]: weight for name, weight in found.items()}


def _chain(model: Any) -> list[PipelineLayer]:
    family = family_of(model)
    chain = list(family.chain(model, family.default))
    name_weights(model, chain, dict(family.spares(model)))
    return chain
