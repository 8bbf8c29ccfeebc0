# SPDX-License-Identifier: Apache-2.0
"""How weights are split, by their Hugging Face names; a split model's weights put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.errors import ModelError
from wavemare.parallel.tensor.vocabulary import VocabParallelEmbedding, VocabularyShare


@dataclass(frozen=True)
class Partition:
    """How a tensor is cut.

    Args:
        dim: The dimension.
        blocks: Number of equal blocks along it. Every rank gets a part of each: 3 where queries,
            keys and values are one tensor.
        vocabulary: The dimension counts tokens, and the last ranks may get fewer.
    """

    dim: int
    blocks: int = 1
    vocabulary: bool = False

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of a rank's part.

        Args:
            whole: The tensor.
            rank: Of ``range(ranks)``.
            ranks: That share it.

        Raises:
            ValueError: The dimension cannot be divided by the number of ranks.
        """
        size = whole.shape[self.dim]
        if self.vocabulary:
            return VocabularyShare(size, rank, ranks).part(whole).clone()
        if size % (self.blocks * ranks):
            raise ValueError(f"{size} cannot be divided by {self.blocks * ranks}")
        parts = [block.chunk(ranks, self.dim)[rank] for block in whole.chunk(self.blocks, self.dim)]
        return torch.cat(parts, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which these are the ranks' parts."""
        blocks = zip(*(part.chunk(self.blocks, self.dim) for part in parts), strict=True)
        return torch.cat([torch.cat(block, self.dim) for block in blocks], self.dim)


_FIRST, _SECOND = Partition(0), Partition(1)
_TOKENS = Partition(0, vocabulary=True)

_PARTITIONS = {
    # GPT-2, whose Conv1D has weights of shape (inputs, outputs)
    "wte.weight": _TOKENS,
    "attn.c_attn.weight": Partition(1, blocks=3),
    "attn.c_attn.bias": Partition(0, blocks=3),
    "attn.c_proj.weight": _FIRST,
    "mlp.c_fc.weight": _SECOND,
    "mlp.c_fc.bias": _FIRST,
    "mlp.c_proj.weight": _FIRST,
    "lm_head.weight": _TOKENS,
    # BERT
    "embeddings.word_embeddings.weight": _TOKENS,
    "attention.self.query.weight": _FIRST,
    "attention.self.query.bias": _FIRST,
    "attention.self.key.weight": _FIRST,
    "attention.self.key.bias": _FIRST,
    "attention.self.value.weight": _FIRST,
    "attention.self.value.bias": _FIRST,
    "output.dense.weight": _SECOND,  # of the attention and of the layer
    "intermediate.dense.weight": _FIRST,
    "intermediate.dense.bias": _FIRST,
    "predictions.decoder.weight": _TOKENS,
    "predictions.decoder.bias": _TOKENS,
    "predictions.bias": _TOKENS,
}


def partition_of(name: str) -> Partition | None:
    """Return how the weight of a name in a model's state dict is cut; None: all ranks hold it."""
    parts = name.split(".")
    suffixes = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_PARTITIONS[suffix] for suffix in suffixes if suffix in _PARTITIONS), None)


def merge_tensor(name: str, parts: Sequence[Tensor], vocab_size: int | None) -> Tensor:
    """Merge the parts of one weight; the inverse of `Partition.part`.

    Args:
        name: In the model's state dict.
        parts: One for each rank, in their order. What is not split is taken from the first.
        vocab_size: Number of tokens, where parts have padding; None where they have none.
    """
    partition = partition_of(name)
    if partition is None:
        return parts[0].detach().clone()
    whole = partition.whole([part.detach() for part in parts])
    return whole[:vocab_size].clone() if partition.vocabulary and vocab_size else whole


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
