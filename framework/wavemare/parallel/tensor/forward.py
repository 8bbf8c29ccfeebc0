"""The forward pass of a split language model: its loss, or its logits."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from wavemare.parallel.tensor.loss import next_tokens
from wavemare.parallel.tensor.vocabulary import VocabParallelHead

__all__ = ["compute_loss_over_group"]


def compute_loss_over_group(model: Any, head: VocabParallelHead, *, shifts_labels: bool) -> None:
    """Let a model compute its loss from logits that are spread over the ranks.

    With labels it returns the loss and no logits; without, it gathers the logits.

    Args:
        model: A transformers language model, whose ``forward`` is replaced by one with the same
            parameters.
        head: Its output projection.
        shifts_labels: Whether a position predicts the next one's label.
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
            entries["logits"] = head.gather(logits)
        else:
            if shifted is None:
                shifted = next_tokens(labels) if shifts_labels else labels
            entries["loss"] = head.loss(logits, shifted, num_items)
        output = type(output)(**entries)
        by_name = model.config.return_dict if by_name is None else by_name
        return output if by_name else output.to_tuple()

    model.forward = forward
