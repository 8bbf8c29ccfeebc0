# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face batch to the (inputs, labels) of a DeepSpeed pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wavemare.errors import ModelError

__all__ = ["split_batch"]

_BATCH_NDIM = 2


def split_batch(
    batch: Mapping[str, Tensor], inputs: Sequence[str], *, labels_required: bool = True
) -> tuple[Tensor | tuple[Tensor, ...], Tensor | tuple[()]]:
    """Order a batch's entries as the pipeline expects them.

    A missing ``attention_mask`` becomes ones, ``token_type_ids`` zeros and ``position_ids``
    0, 1, 2, ...; an undeclared ``attention_mask`` of all ones is dropped.

    Args:
        batch: Entries by name, integers of shape (batch, sequence), and ``labels``.
        inputs: The declared names, ``input_ids`` first.
        labels_required: Whether a batch without labels is an error; else an empty tuple stands
            for them.

    Returns:
        The inputs (a bare tensor if only ``input_ids`` is declared, else a tuple of int64 tensors)
        and the labels.

    Raises:
        ModelError: ``input_ids`` or ``labels`` is missing, an entry is not declared, or has another
            shape than ``input_ids``.
    """
    for name in ("input_ids", "labels") if labels_required else ("input_ids",):
        if name not in batch:
            raise ModelError(
                name, None, "the batch has no such entry", f"Let the collator return {name!r}"
            )
    for name, value in batch.items():
        _check_declared(name, value, inputs)
    ids = batch["input_ids"]
    tensors = []
    for name in inputs:
        value = batch[name] if name in batch else _default(name, ids)
        if value.shape != ids.shape or value.ndim != _BATCH_NDIM:
            raise ModelError(
                name,
                tuple(value.shape),
                f"it is not of shape (batch, sequence) like input_ids {tuple(ids.shape)}",
                "Give one integer for each token",
            )
        tensors.append(value.to(torch.int64).contiguous())
    labels = batch.get("labels", ())
    return (tensors[0] if len(tensors) == 1 else tuple(tensors)), labels


def _check_declared(name: str, value: Tensor, inputs: Sequence[str]) -> None:
    if name in inputs or name == "labels":
        return
    if name == "attention_mask" and bool((value == 1).all()):
        return
    raise ModelError(
        name,
        tuple(value.shape),
        f"the pipeline carries only {', '.join(inputs)}, so this entry would be ignored",
        f"Declare it with to_pipeline(..., inputs={[*inputs, name]}), or drop it from the batch",
    )


def _default(name: str, ids: Tensor) -> Tensor:
    if name == "attention_mask":
        return torch.ones_like(ids)
    if name == "position_ids":
        return torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return torch.zeros_like(ids)
