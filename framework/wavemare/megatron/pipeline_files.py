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
from wavemare.megatron.files import said_by
from wavemare.megatron.models import class_of
from wavemare.models.families import family_of
from wavemare.models.layers import PipelineLayer, name_weights

_LATEST = "latest"


def read_pipeline(folder: str | Path, config: Any) -> dict[str, Tensor]:
    """Read the weights of the newest checkpoint as the state dict of the whole model.

    Args:
        folder: What ``save_checkpoint`` was given.
        config: The model's configuration.

    Raises:
        CheckpointError: There is none, a layer is missing or damaged, or the layers are not those
            of the model, or split over ranks.
    """
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
