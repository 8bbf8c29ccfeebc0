# SPDX-License-Identifier: Apache-2.0
"""The weights of a split model: this rank's, or all of them on the first rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.errors import ModelError
from wavemare.parallel.tensor.partition import merge_tensor, partition_of
from wavemare.parallel.tensor.vocabulary import VocabParallelEmbedding

__all__ = [
    "gather_weights",
    "is_split",
    "merged_state_dict",
    "split_embedding",
    "whole_without_weights",
]


def merged_state_dict(model: Any) -> dict[str, Tensor] | None:
    """Gather the weights of a split model, one at a time; all ranks of its group call this.

    Args:
        model: What :func:`split_model` has returned, or an engine that holds it.

    Returns:
        On the group's first rank the state dict of the model as it was before it was split, on the
        device ``cpu``; names that are tied share one tensor. None on the other ranks.

    Raises:
        ModelError: The model has not been split, or ZeRO-3 has cut its weights further.
    """
    while not isinstance(model, PreTrainedModel) and hasattr(model, "module"):
        model = model.module
    embedding = split_embedding(model)
    state = model.state_dict(keep_vars=True)
    merged = gather_weights(state, embedding.group, embedding.share.tokens)
    return merged if dist.get_rank(embedding.group) == 0 else None


def gather_weights(state: Mapping[str, Tensor], group: Any, tokens: int) -> dict[str, Tensor]:
    """Gather the weights of a split model, or of some of its layers, on a group's first rank.

    All ranks of the group call this, and keep the tensors of one weight at a time.

    Args:
        state: This rank's parts by their names in the model's state dict.
        group: The ranks.
        tokens: Size of the vocabulary.

    Returns:
        On the first rank whole tensors on the device ``cpu``, one for all names of a tensor; on the
        other ranks what was given.

    Raises:
        ModelError: ZeRO-3 has cut the weights further.
    """
    merged: dict[int, Tensor] = {}
    for name, part in state.items():
        if hasattr(part, "ds_id"):
            raise ModelError(
                name, None, "ZeRO-3 holds this weight in pieces of its own", "Use ZeRO 0, 1 or 2"
            )
        if id(part) in merged:
            continue
        parts = _gather(part.detach(), group) if partition_of(name) else [part.detach()]
        first = dist.get_rank(group) == 0
        merged[id(part)] = merge_tensor(name, parts, tokens).cpu() if first else part
    return {name: merged[id(part)] for name, part in state.items()}


def whole_without_weights(model: PreTrainedModel, config: Any = None) -> PreTrainedModel:
    """Return the model that a split one was made of, on the meta device.

    Args:
        model: What :func:`split_model` has returned.
        config: The whole model's; the split one's if omitted.
    """
    with torch.device("meta"):
        whole: Any = type(model)(model.config if config is None else config)
    if model.can_generate():
        whole.generation_config = model.generation_config
    return cast(PreTrainedModel, whole.to(model.dtype))


def is_split(model: Any) -> bool:
    """Whether a model is one that `split_model` has returned."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, VocabParallelEmbedding) for module in model.modules()
    )


def split_embedding(model: nn.Module) -> VocabParallelEmbedding:
    """Return the embedding of a split model, which knows its group and its vocabulary.

    Raises:
        ModelError: The model has not been split.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            return module
    raise ModelError(
        "model", type(model).__name__, "it is not split over ranks", "Call split_model first"
    )


def _gather(part: Tensor, group: Any) -> list[Tensor]:
    """Return the ranks' tensors, of one shape, on the group's first rank; elsewhere nothing."""
    first = dist.get_rank(group) == 0
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))] if first else []
    dist.gather(part.contiguous(), parts or None, group_dst=0, group=group)
    return parts
