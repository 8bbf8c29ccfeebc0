# SPDX-License-Identifier: Apache-2.0
"""The loss on the last stage of the Trainer's pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils.generic import ModelOutput

from wavemare.hf.steps import IGNORED
from wavemare.models.split import SplitLoss

__all__ = ["StepLoss", "ignores_counts", "weighted_labels", "whole_logits"]


class StepLoss:
    """A micro-batch's part of the mean over all labels of an optimizer step.

    Labels come as (labels, weight, items): the micro-batch's mean is multiplied by ``weight``, and
    ``items`` is what a ``compute_loss_func`` divides its sum by. The mean over micro-batches and
    data ranks is then the mean over the step's labels. Plain labels have weight 1.

    Args:
        loss: The model's loss of (logits, labels), a mean over labels.
        smoother: transformers' label smoother, or None.
        shifts: Whether the smoother compares each position with the label after it.
        function: The Trainer's ``compute_loss_func``, or None.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        *,
        smoother: Any = None,
        shifts: bool = False,
        function: Callable[..., Tensor] | None = None,
    ) -> None:
        self.inner = loss
        self._smoother = smoother
        self._shifts = shifts
        self._function = function

    def __call__(self, logits: Any, labels: Any) -> Tensor:
        """Return the weighted loss of a micro-batch; scalar."""
        if not isinstance(labels, (tuple, list)):
            return self._mean(logits, labels)
        labels, weight, items = labels
        if self._function is None:
            return self._mean(logits, labels) * weight
        outputs = ModelOutput(logits=whole_logits(self, logits))
        return self._function(outputs, labels, num_items_in_batch=items) * (weight > 0)

    def _mean(self, logits: Any, labels: Tensor) -> Tensor:
        if self._smoother is None:
            return self.inner(logits, labels)
        smoothed: Tensor = self._smoother(
            (whole_logits(self, logits),), labels, shift_labels=self._shifts
        )
        return smoothed


def ignores_counts(model: Any) -> bool:
    """Whether a transformers model ignores ``num_items_in_batch`` and averages over its labels.

    The Trainer then multiplies a mean by the number of processes.
    """
    names = inspect.unwrap(type(unwrap_peft_model(model)).forward).__code__.co_names
    return "CrossEntropyLoss" in names and "loss_function" not in names


def whole_logits(loss: Any, logits: Any) -> Any:
    """Return the logits over the whole vocabulary, gathered from tensor-parallel ranks.

    Args:
        loss: The last stage's loss function.
        logits: The last stage's output on this rank.
    """
    inner = loss.inner if isinstance(loss, StepLoss) else loss
    return inner.gather(logits) if isinstance(inner, SplitLoss) else logits


def weighted_labels(
    batches: Sequence[Mapping[str, Any]], micro_batches: int, *, shifts: bool, group: Any = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the labels of a step's micro-batches as `StepLoss` takes them.

    Args:
        batches: The batches that were read; micro-batches beyond them repeat them, with weight 0.
        micro_batches: Number per step.
        shifts: Whether labels are shifted, so that the first label of each row does not count.
        group: Data-parallel ranks whose labels count together; None for this rank alone.
    """
    labels = [batch["labels"] for batch in batches]
    counts = [_count(one, shifts) for one in labels]
    total = torch.stack(counts).sum()
    ranks = 1
    if group is not None:
        dist.all_reduce(total, group=group)
        ranks = dist.get_world_size(group)
    items = total.clamp(min=1) / (micro_batches * ranks)
    weighted = [
        # The mean over no label is NaN, also with weight 0.
        (one if count else torch.zeros_like(one), count / items, items)
        for one, count in zip(labels, counts, strict=True)
    ]
    zero = torch.zeros_like(items)
    repeated = (weighted[n % len(batches)] for n in range(len(batches), micro_batches))
    return weighted + [(one, zero, items) for one, _, items in repeated]


def _count(labels: Tensor, shifts: bool) -> Tensor:
    counted = labels[..., 1:] if shifts else labels
    if counted.is_floating_point():
        return torch.tensor(float(len(labels)), device=labels.device)
    return (counted != IGNORED).sum().to(torch.float32)
