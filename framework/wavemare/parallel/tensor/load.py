# SPDX-License-Identifier: Apache-2.0
"""A split model from a Hugging Face folder: each rank reads its own parts from the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch import distributed as dist

from wavemare.errors import ModelError
from wavemare.parallel.tensor.layers import VocabularyShare
from wavemare.parallel.tensor.partition import Partition
from wavemare.parallel.tensor.split import split_model

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_split(
    folder: str | os.PathLike[str], group: Any, *, dtype: torch.dtype | None = None
) -> Any:
    """Return the model of a folder, split over a group; no rank ever holds the whole.

    The proof of `split_model` needs the whole model, so it is not made here.

    Args:
        folder: With ``config.json`` and safetensors whose names are the model's own.
        group: The ranks, all of which call this.
        dtype: Of the weights; the folder's if omitted.

    Raises:
        ModelError: The class cannot be split, or the folder lacks files or a weight.
    """
    files = {path.name for path in Path(folder).glob("*") if path.is_file()}
    if "config.json" not in files or not files & {_WEIGHTS, _INDEX}:
        reason = f"it has no config.json, or neither {_WEIGHTS} nor {_INDEX}"
        raise ModelError("folder", str(folder), reason, "Give one that save_pretrained has written")
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    with init_empty_weights(include_buffers=False):
        model = kind(config)
    model.tie_weights()
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    weights = Weights(model, Path(folder), group, dtype)
    return split_model(model, group, weights=weights, verify=False)


class Weights:
    """The weights of a folder, for the parameters of a model on the meta device.

    Args:
        model: The model, before it is split.
        folder: Where the files are.
        group: The ranks.
        dtype: Of what is returned; the folder's if omitted.
    """

    def __init__(
        self, model: nn.Module, folder: Path, group: Any, dtype: torch.dtype | None
    ) -> None:
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._folder = folder
        self._dtype = dtype
        index = folder / _INDEX
        if index.exists():
            self._files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with safe_open(folder / _WEIGHTS, "pt") as file:
                self._files = dict.fromkeys(file.keys(), _WEIGHTS)
        buffers = dict(model.named_buffers())
        for name in buffers.keys() & model.state_dict().keys() & self._files.keys():
            with safe_open(folder / self._files[name], "pt") as file:
                buffers[name].copy_(file.get_tensor(name))
        self._names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in self._files:
                self._names[id(parameter)] = name
        missing = [name for name, p in model.named_parameters() if id(p) not in self._names]
        if missing:
            reason = f"the folder {folder} has no weight of this name"
            remedy = (
                "Load it with from_pretrained, and save it again with save_original_format=False, "
                "or split it"
            )
            raise ModelError("weight", missing[0], reason, remedy)

    def read(self, parameter: nn.Parameter, partition: Partition | None) -> Tensor:
        """Return this rank's part of a parameter, or all of it."""
        name = self._names[id(parameter)]
        with safe_open(self._folder / self._files[name], "pt") as file:
            stored = file.get_slice(name)
            tensor = stored[:] if partition is None else self._part(stored, partition)
        return tensor.to(self._dtype or tensor.dtype)

    def _part(self, stored: Any, partition: Partition) -> Tensor:
        def between(first: int, last: int) -> Tensor:
            return stored[(slice(None),) * partition.dim + (slice(first, last),)]

        if partition.tokens is not None:
            share = VocabularyShare(partition.tokens, self._rank, self._ranks)
            first = min(share.first, share.tokens)
            return share.padded(between(first, first + share.held))
        block = stored.get_shape()[partition.dim] // partition.blocks
        width = block // self._ranks
        starts = [block * i + width * self._rank for i in range(partition.blocks)]
        return torch.cat([between(start, start + width) for start in starts], partition.dim)
