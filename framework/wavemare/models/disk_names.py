# SPDX-License-Identifier: Apache-2.0
"""Names of a model's weights in its folder: transformers holds some in another form in memory.

Above all it fuses experts, whose files have a weight for each. What is fused, and how, is asked of
transformers itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    revert_weight_conversion,
)

from wavemare.errors import ModelError
from wavemare.models.source import Stored, size_of


@dataclass(frozen=True)
class Piece:
    """A weight on the disk.

    Attributes:
        name: Its name there.
        of: The weight in memory that it is, or is a part of.
        expert: Its number, if experts are fused in memory.
        part: Its number among the parts of an expert's rows.
        parts: How many there are.
    """

    name: str
    of: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def index(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where it stands in the weight in memory, whose shape is given."""
        if self.expert is None:
            return ()
        rows = shape[1] // self.parts
        return slice(self.expert, self.expert + 1), slice(self.part * rows, (self.part + 1) * rows)

    def place(self, whole: Stored) -> tuple[int, int]:
        """Return its first byte in the weight in memory, and its length in bytes."""
        length = size_of(Stored(self.shape(whole.shape), whole.dtype))
        return ((self.expert or 0) * self.parts + self.part) * length, length

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return its own shape, of the shape of the weight in memory."""
        return shape if self.expert is None else (shape[1] // self.parts, *shape[2:])


def empty_model(config: Any, kind: Any = None, *, buffers: bool = False) -> Any:
    """Return a configuration's model on the meta device.

    Args:
        config: Of transformers.
        buffers: Whether buffers have their values.
        kind: The class; by default the first of the configuration's ``architectures``, or its
            causal language model.

    Raises:
        ModelError: Transformers cannot make it.
    """
    named = (config.architectures or [""])[0]
    try:
        kind = kind or getattr(transformers, named, None)
        kind = kind or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with init_empty_weights(include_buffers=False) if buffers else torch.device("meta"):
            model = kind(config)
    except Exception as error:  # of wrong values, too, for which transformers has its own
        reason = f"transformers makes no model of it ({' '.join(str(error).split())[:200]})"
        remedy = "Mend the folder's config.json"
        raise ModelError("config", config.model_type, reason, remedy) from error
    model.tie_weights()
    return model


def kept_names(model: Any) -> dict[str, Stored]:
    """Return the weights in memory that a folder has: of tied names one alone."""
    tied = set(model.all_tied_weights_keys or {})
    state = model.state_dict(keep_vars=True)
    sharing: dict[int, list[str]] = {}
    for name, tensor in state.items():
        sharing.setdefault(id(tensor), []).append(name)
    left_out = set()
    for names in sharing.values():
        duplicates = sorted(name for name in names if name in tied)
        left_out |= set(duplicates[: len(names) - 1])
    ignored = set(model._keys_to_ignore_on_save or ())
    return {
        name: Stored(tuple(tensor.shape), tensor.dtype)
        for name, tensor in state.items()
        if name not in left_out | ignored
    }


def pieces_of(model: Any, kept: Mapping[str, Stored]) -> list[Piece]:
    """Return the weights that ``save_pretrained`` writes, in its order.

    Args:
        model: On the meta device.
        kept: The weights in memory that are saved.

    Raises:
        ModelError: Transformers fuses weights in a way that is not known here.
    """
    fused, placed = _converted(model, kept), {}
    for name in kept:
        if name not in fused:
            continue
        converter = fused[name]
        kinds = [type(operation) for operation in converter.operations]
        dims = [getattr(operation, "dim", 0) for operation in converter.operations]
        known = (
            kinds == [MergeModulelist, Concatenate][: len(kinds)] and dims == [0, 1][: len(kinds)]
        )
        if not known or not kinds:
            reason = "transformers changes it between disk and memory in a way that is not known"
            remedy = "Save the model again with save_original_format=False"
            raise ModelError("weight", name, reason, remedy)
        parts, experts = len(converter.source_patterns), kept[name].shape[0]
        alone = revert_weight_conversion(model, {name: _empty(kept[name])})
        for number, disk in enumerate(alone):
            placed[disk] = Piece(disk, name, number % experts, number // experts, parts)
    order = revert_weight_conversion(model, {name: _empty(kept[name]) for name in kept})
    plain = iter(_plain(model, [name for name in kept if name not in fused]).items())
    renamed = {disk: Piece(disk, name) for name, disk in plain}
    return [placed.get(disk) or renamed[disk] for disk in order]


def shards_of(
    model: Any, kept: Mapping[str, Stored], max_shard_size: int | str
) -> tuple[dict[str, list[str]], int]:
    """Return the names in each file that ``save_pretrained`` writes, and the bytes of all."""
    state = revert_weight_conversion(model, {name: _empty(kept[name]) for name in kept})

    def storage(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata  # of experts that were cut from one tensor

    split = split_state_dict_into_shards_factory(
        state,
        max_shard_size=max_shard_size,
        filename_pattern="model{suffix}.safetensors",
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=storage,
    )
    return split.filename_to_tensors, split.metadata["total_size"]


def _empty(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _converted(model: Any, names: Iterable[str]) -> dict[str, WeightConverter]:
    """Return by name in memory what transformers makes it of."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = {}
    for name in names:
        for converter in converters:
            backwards = converter.reverse_transform()
            if backwards.rename_source_key(name)[1] is not None:
                found[name] = converter
                break
    return found


def _plain(model: Any, names: list[str]) -> dict[str, str]:
    """Return by name in memory the name on the disk of what is only renamed."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    if not any(not isinstance(entry, PrefixChange) for entry in mapping):
        return {name: name for name in names}
    found = {}
    for name in names:
        (disk,) = revert_weight_conversion(model, {name: torch.empty(0, device="meta")})
        found[name] = disk
    return found
