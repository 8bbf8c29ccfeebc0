# SPDX-License-Identifier: Apache-2.0
"""Embedding and output projection of which each rank holds the rows of some tokens."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from wavemare.parallel.tensor.collectives import gather_from_group, reduce_from_group
from wavemare.parallel.tensor.layers import ColumnParallelLinear
from wavemare.parallel.tensor.loss import vocab_parallel_cross_entropy
from wavemare.parallel.tensor.share import VocabularyShare

__all__ = ["VocabParallelEmbedding", "VocabParallelHead"]


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are spread over the ranks.

    Args:
        weight: The rank's rows, (rows, hidden).
        share: Which tokens these are.
        group: The ranks.
        padding_idx: A token whose row gets no gradient here, as in ``nn.Embedding``.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        share: VocabularyShare,
        group: Any,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.share = share
        self.group = group
        row = -1 if padding_idx is None else padding_idx - share.first
        self._padding_row = row if 0 <= row < share.held else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens, (batch, sequence), into (batch, sequence, hidden)."""
        rows, here = self.share.locate(tokens)
        embedded = F.embedding(rows, self.weight, self._padding_row)
        return reduce_from_group(embedded.masked_fill(~here[..., None], 0), self.group)


class VocabParallelHead(ColumnParallelLinear):
    """An output projection of which each rank computes the logits of its tokens.

    Args:
        weight: The rank's rows, (rows, hidden); may be that of the embedding.
        bias: The rank's part, (rows,).
        share: Which tokens these are.
        group: The ranks.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, share: VocabularyShare, group: Any
    ) -> None:
        super().__init__(weight, bias, group)
        self.share = share

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens, (..., tokens), from each rank's (..., rows)."""
        return gather_from_group(logits, self.group)[..., : self.share.tokens]

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
        """Return `vocab_parallel_cross_entropy` of this rank's logits."""
        return vocab_parallel_cross_entropy(logits, labels, self.share, self.group, num_items)
