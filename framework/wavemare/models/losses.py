# SPDX-License-Identifier: Apache-2.0
"""Losses of transformers' heads as functions of (logits, labels)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss, ForSequenceClassificationLoss

__all__ = ["ClassificationLoss", "LanguageModelLoss", "Loss", "masked_cross_entropy"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""From (logits, labels) to a scalar."""


@dataclass(frozen=True)
class LanguageModelLoss:
    """Mean cross-entropy over the labels other than -100.

    Args:
        function: transformers' loss of the head, for example ``ForCausalLMLoss``, which shifts the
            labels by one.
        vocab_size: Size of the logits' last dimension.
    """

    function: Callable[..., Tensor]
    vocab_size: int

    @property
    def shifts_labels(self) -> bool:
        """Whether the first label of each sequence is compared with nothing."""
        return self.function is ForCausalLMLoss

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits (batch, sequence, vocabulary) and labels (batch, sequence)."""
        return self.function(logits=logits, labels=labels, vocab_size=self.vocab_size)


def masked_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Return BERT's own loss; unlike transformers' function of that purpose it does not upcast.

    Args:
        logits: (batch, sequence, vocabulary).
        labels: (batch, sequence), -100 where nothing is to be guessed.
        vocab_size: The last dimension of the logits.
    """
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


@dataclass(frozen=True)
class ClassificationLoss:
    """The loss of transformers' sequence classification.

    Args:
        num_labels: Number of outputs.
        problem_type: ``regression``, ``single_label_classification``,
            ``multi_label_classification`` or None: decided by each batch as transformers does.
    """

    num_labels: int
    problem_type: str | None

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits (batch, labels) and labels (batch,) or (batch, labels)."""
        # transformers writes its decision into the configuration that it is given; only the last
        # stage sees labels, so it gets one of its own.
        config: Any = SimpleNamespace(num_labels=self.num_labels, problem_type=self.problem_type)
        loss: Tensor = ForSequenceClassificationLoss(labels, logits, config)
        return loss
