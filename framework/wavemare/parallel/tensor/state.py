"""The weights of a split model: this rank's, or all of them on the first rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.errors import ModelError
from wavemare.parallel.tensor.partition import merge_tensor, partition_of
from wavemare.parallel.tensor.vocabulary import VocabParallelEmbedding

__all__ = ["is_split", "merged_state_dict", "split_embedding"]


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
    merged: dict[int, Tensor] = {}
    for name, part in state.items():
        if hasattr(part, "ds_id"):
            raise ModelError(
                name, None, "ZeRO-3 holds this weight in pieces of its own", "Use ZeRO 0, 1 or 2"
            )
        if id(part) in merged:
            continue
        parts = _gather(part.detach(), embedding.group) if partition_of(name) else [part.detach()]
        if dist.get_rank(embedding.group) == 0:
            merged[id(part)] = merge_tensor(name, parts, embedding.share.tokens).cpu()
        else:
            merged[id(part)] = part
    if dist.get_rank(embedding.group) != 0:
        return None
    return {name: merged[id(part)] for name, part in state.items()}


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
