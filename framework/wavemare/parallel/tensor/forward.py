# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a split language model: its loss, or its logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wavemare.parallel.tensor.loss import next_tokens
from wavemare.parallel.tensor.vocabulary import VocabParallelHead

__all__ = ["compute_loss_in_head", "compute_loss_over_group"]


def compute_loss_over_group(model: Any, head: VocabParallelHead, *, shifts_labels: bool) -> None:
    """Let a model compute its loss from logits that are spread over the ranks.

    With labels it returns the loss and no logits; without, it gathers the logits.

    Args:
        model: A transformers language model, whose ``forward`` is replaced by one with the same
            parameters.
        head: Its output projection.
        shifts_labels: Whether a position predicts the next one's label.
    """

    def loss(logits: Tensor, labels: Any, shifted: Any, num_items: Any) -> Tensor:
        if shifted is None:
            shifted = next_tokens(labels) if shifts_labels else labels
        return head.loss(logits, shifted, num_items)

    compute_loss_in_head(model, gather=head.gather, loss=loss)


def compute_loss_in_head(
    model: Any, *, gather: Callable[[Tensor], Tensor], loss: Callable[..., Tensor]
) -> None:
    """Replace a model's ``forward`` by one whose loss is computed from its head's output.

    Args:
        model: A transformers model; the new ``forward`` has the same parameters.
        gather: From the head's output to the logits, where there are no labels.
        loss: Of the head's output, ``labels``, ``shift_labels`` and ``num_items_in_batch``, each
            None where it was not given.
    """
    whole = model.forward
    signature = inspect.signature(whole)

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        labels = bound.arguments.pop("labels", None)
        others = bound.arguments.setdefault("kwargs", {})
        num_items = others.pop("num_items_in_batch", None)
        shifted = others.pop("shift_labels", None)
        by_name = others.pop("return_dict", None)
        others["return_dict"] = True
        output = whole(*bound.args, **bound.kwargs)
        entries = dict(output)
        logits = entries.pop("logits")
        if labels is None and shifted is None:
            entries["logits"] = gather(logits)
        else:
            entries["loss"] = loss(logits, labels, shifted, num_items)
        output = type(output)(**entries)
        by_name = model.config.return_dict if by_name is None else by_name
        return output if by_name else output.to_tuple()

    model.forward = forward
