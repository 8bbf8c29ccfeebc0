# SPDX-License-Identifier: Apache-2.0
"""What the last stage of a pipeline has computed, on all stages; and rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_map_only
from transformers.trainer_pt_utils import find_batch_size

from wavemare.errors import ModelError, WavemareError


@dataclass(frozen=True)
class _Form:
    """Stands for a tensor of this shape and type."""

    shape: torch.Size
    dtype: torch.dtype


def of_last_stage(engine: Any, predicted: Any) -> Any:
    """Broadcast what the last stage has predicted; its error is raised by all stages.

    Args:
        engine: The pipeline's; all its stages call this.
        predicted: Nested tensors, or an error; of the last stage alone.

    Raises:
        ModelError: The last stage has an error.
    """
    failure = None
    if isinstance(predicted, WavemareError):
        failure = [predicted.key, str(predicted.value), predicted.reason, predicted.remedy]
    elif isinstance(predicted, Exception):
        reason = f"it failed on the last stage ({predicted!r})"
        failure = ["compute_loss", "an evaluation", reason, "Mend what that stage has raised"]
    failure, found = from_last_stage(engine, (failure, None if failure else predicted))
    if failure:
        raise predicted if isinstance(predicted, Exception) else ModelError(*failure)
    return found


def from_last_stage(engine: Any, values: Any) -> Any:
    """Broadcast nested tensors and plain values from the last stage to all stages."""
    group, source = engine.grid.get_pipe_parallel_group(), engine.loss_rank
    forms = [tree_map_only(Tensor, lambda own: _Form(own.shape, own.dtype), values)]
    dist.broadcast_object_list(forms, src=source, group=group)
    if not engine.is_last_stage():
        values = tree_map_only(
            _Form, lambda f: torch.empty(f.shape, dtype=f.dtype, device=engine.device), forms[0]
        )

    def sent(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    return tree_map_only(Tensor, sent, values)


def labels_of(batch: Any, names: Sequence[str]) -> Any:
    """Return a batch's labels by their names, as transformers' step of an evaluation does.

    Args:
        batch: Entries by name.
        names: ``TrainingArguments(label_names=...)``, or what transformers finds for a model.

    Returns:
        A tuple, or the one entry if there is one name; None if an entry is missing.
    """
    found = tuple(batch.get(name) for name in names)
    if not found or any(each is None for each in found):
        return None
    return found if len(found) > 1 else found[0]


def first_rows(batch: Any, rows: int) -> dict[str, Any]:
    """Return the first rows of a batch."""
    count = find_batch_size(batch)
    return {
        name: value[:rows]
        if isinstance(value, Tensor) and value.ndim and len(value) == count
        else value
        for name, value in batch.items()
    }


def filled(values: Any, own: int, rows: int) -> Any:
    """Return what a model gave for its own rows as for more rows, that repeat the first ones.

    Routers give several rows for each of the batch. A number for the whole batch stays.
    """
    if values is None:
        return None
    if not isinstance(values, Tensor):
        return tuple(filled(value, own, rows) for value in values)
    if values.ndim == 0 or own >= rows:
        return values
    return values[torch.arange(len(values) * rows // own) % len(values)]
