# SPDX-License-Identifier: Apache-2.0
"""Which labels of a batch count in the loss of a transformers model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that does not count."""


def shifts_labels(model: Any) -> bool:
    """Whether a position of a model predicts the next one's label.

    It follows from the function that the model computes its loss with; a ``PeftModel`` has that of
    the model inside.
    """
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def counts_items(model: Any) -> bool:
    """Whether a model divides the sum of its losses by ``num_items_in_batch``.

    Models that call torch's loss themselves, as BERT does, ignore it and return a mean. A class of
    the caller's own may call ``forward`` of the class that it extends.
    """
    for kind in type(model).__mro__:
        forward: Callable[..., Any] | None = vars(kind).get("forward")
        if forward is not None:
            names = inspect.unwrap(forward).__code__.co_names
            if "loss_function" in names or "forward" not in names:
                return "loss_function" in names
    return False


def count_labels(labels: Tensor, shifts: bool) -> Tensor:
    """Return the number of labels that count; () float32.

    Args:
        labels: (batch, sequence) or (batch,).
        shifts: Whether labels are shifted, so that the first one of each row does not count.
    """
    return ((labels[..., 1:] if shifts else labels) != IGNORED).sum().to(torch.float32)
