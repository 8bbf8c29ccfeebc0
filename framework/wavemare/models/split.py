# SPDX-License-Identifier: Apache-2.0
"""A model split over ranks as layers of a pipeline: its tied head and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from wavemare.models.activations import SideInputs
from wavemare.models.families import ClassificationLoss, Loss
from wavemare.models.layers import Head, PipelineLayer, TiedHead, TokenEmbedding
from wavemare.parallel.tensor.layers import copy_to_group, gather_from_group, split_parameter
from wavemare.parallel.tensor.partition import split_embedding
from wavemare.parallel.tensor.vocabulary import (
    VocabParallelHead,
    VocabularyShare,
    next_tokens,
    vocab_parallel_cross_entropy,
)

__all__ = ["SplitLoss", "SplitTiedHead", "split_chain", "split_loss"]


class SplitTiedHead(TiedHead):
    """An output projection with this rank's rows of the word embedding.

    Args:
        inputs: Names of the tensors that enter the first layer.
        tied: The layer that owns the weights, a ``VocabParallelEmbedding``.
        bias: This rank's part of a bias of its own, (rows,).
    """

    def __init__(
        self, inputs: Sequence[str], tied: TokenEmbedding, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__(inputs, tied, bias)
        embedding: Any = tied.embedding
        self._share: VocabularyShare = embedding.share
        self._group = embedding.group

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Return this rank's logits, (batch, sequence, rows)."""
        return super().run(copy_to_group(hidden, self._group), sides)

    def untied(self) -> Head:
        """Return a head with a copy of this rank's rows; the bias is the same parameter."""
        weight: Any = self.tied.embedding.weight
        own = split_parameter(
            weight.detach().clone(), 0, weight.requires_grad, whole_numel=weight.whole_numel
        )
        return Head(self.inputs, VocabParallelHead(own, self.bias, self._share, self._group))


@dataclass(frozen=True)
class SplitLoss:
    """Mean cross-entropy of logits that are spread over ranks, over the labels other than -100.

    Args:
        shifts_labels: Whether a position predicts the next one's label.
        share: Which tokens this rank's logits are of.
        group: The ranks.
    """

    shifts_labels: bool
    share: VocabularyShare
    group: Any

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits (batch, sequence, rows) and labels (batch, sequence)."""
        labels = next_tokens(labels) if self.shifts_labels else labels
        return vocab_parallel_cross_entropy(logits, labels, self.share, self.group)

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens on all ranks, (batch, sequence, tokens)."""
        return gather_from_group(logits, self.group)[..., : self.share.tokens]


def split_chain(chain: Sequence[PipelineLayer]) -> tuple[PipelineLayer, ...]:
    """Return the layers of a split model, given those that its family makes of a whole one."""
    return tuple(
        SplitTiedHead(layer.inputs, layer.tied, layer.bias)
        if isinstance(layer, TiedHead)
        else layer
        for layer in chain
    )


def split_loss(model: nn.Module, loss: Loss) -> Loss:
    """Return the loss of a split model's head, given that of a whole one."""
    if isinstance(loss, ClassificationLoss):
        return loss
    embedding = split_embedding(model)
    return SplitLoss(isinstance(model, GPT2LMHeadModel), embedding.share, embedding.group)
