# SPDX-License-Identifier: Apache-2.0
"""Which weights are split, and how, by their Hugging Face names; state dicts cut so, and merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavemare.errors import ModelError
from wavemare.parallel.tensor.share import VocabularyShare

__all__ = ["Partition", "merge_state_dict", "partition_of", "split_state_dict"]


@dataclass(frozen=True)
class Partition:
    """How a tensor is cut.

    Args:
        dim: The dimension.
        blocks: Number of equal blocks along it, of each of which every rank gets a part: 3 where
            queries, keys and values are one tensor.
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


def split_state_dict(state: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return a rank's part of a Hugging Face state dict, under the same names and without padding.

    Args:
        state: That of a GPT-2 or BERT model. Names that share a tensor share one in the result.
        rank: The rank in its group.
        size: Size of the group.

    Raises:
        ModelError: A width cannot be divided by the number of ranks.
    """
    parts: dict[int, Tensor] = {}
    for name, whole in state.items():
        if id(whole) not in parts:
            parts[id(whole)] = _part(name, whole.detach(), rank, size)
    return {name: parts[id(whole)] for name, whole in state.items()}


def merge_state_dict(
    shards: Sequence[Mapping[str, Tensor]], vocab_size: int | None = None
) -> dict[str, Tensor]:
    """Return the state dict of which these are the ranks' parts; the inverse of `split_state_dict`.

    Args:
        shards: One for each rank, in the order of ranks. What is not split is taken from the first.
        vocab_size: Number of tokens, for shards that have padding, as a split model's own
            ``state_dict()``; without it no padding is looked for.
    """
    merged: dict[int, Tensor] = {}
    for name, first in shards[0].items():
        if id(first) not in merged:
            merged[id(first)] = merge_tensor(name, [shard[name] for shard in shards], vocab_size)
    return {name: merged[id(first)] for name, first in shards[0].items()}


def merge_tensor(name: str, parts: Sequence[Tensor], vocab_size: int | None) -> Tensor:
    """Merge the parts of one weight; see `merge_state_dict`."""
    partition = partition_of(name)
    if partition is None:
        return parts[0].detach().clone()
    whole = partition.whole([part.detach() for part in parts])
    return whole[:vocab_size].clone() if partition.vocabulary and vocab_size else whole


def _part(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    partition = partition_of(name)
    if partition is None:
        return whole.clone()
    try:
        return partition.part(whole, rank, size)
    except ValueError as error:
        raise ModelError(
            name,
            tuple(whole.shape),
            f"its dimension {partition.dim} cannot be split over {size} ranks ({error})",
            "Use another number of ranks",
        ) from None
