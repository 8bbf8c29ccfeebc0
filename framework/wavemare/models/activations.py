# SPDX-License-Identifier: Apache-2.0
"""What travels from layer to layer: the hidden states and the integer side inputs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.errors import ModelError
from wavemare.models.packed import kernel_bounds

_BATCH_NDIM = 2
_OF_MASKS = ("_attn_implementation", "sliding_window")  # a proof changes them for a while
Activations = Tensor | tuple[Tensor, ...]
"""Hidden states alone, or followed by the side inputs in their declared order."""

SideInputs = dict[str, Tensor]
"""Declared batch entries other than ``input_ids``, int64 of shape (batch, sequence).

One that the batch does not have is an empty tensor; see `side`.
"""

SUMS = "router_sums"
"""What travels behind the side inputs, if the model has an auxiliary loss."""

MaskMaker = Callable[[Any, Tensor, Tensor | None, Tensor | None], Any]
"""From (config, hidden states, attention mask, position ids) to what the layers' attention takes;
None where the attention needs no mask."""


def unpack(
    activations: Activations | Sequence[Tensor], inputs: Sequence[str]
) -> tuple[Tensor, SideInputs]:
    """Split activations into the hidden states and the side inputs by name.

    Args:
        activations: A tensor, or the first tensor followed by the side inputs.
        inputs: The declared names, ``input_ids`` first.
    """
    if isinstance(activations, Tensor):
        return activations, {}
    first, *sides = activations
    return first, dict(zip(inputs[1:], sides, strict=True))


def pack(hidden: Tensor, sides: SideInputs) -> Activations:
    """Join hidden states and side inputs again; without side inputs a bare tensor travels."""
    return (hidden, *sides.values()) if sides else hidden


def side(sides: SideInputs, name: str) -> Tensor | None:
    """Return a side input; None if it is not declared, or the batch does not have it."""
    value = sides.get(name)
    return value if value is not None and value.numel() else None


class StageContext:
    """Attention masks and rotary tables, computed once per stage and micro-batch.

    All layers of a process share one context. It keeps the results of the last micro-batch, which
    it knows by the identity of the side inputs: these are handed on unchanged from layer to layer
    and are new tensors for each micro-batch.

    Args:
        config: The model's configuration, from which masks are made.
        masks: Mask maker for each kind of attention layer.
        rotary: The model's rotary embedding, called with (hidden states, position ids) and, where
            it makes different tables for them, the kind of attention layer.
    """

    def __init__(
        self, config: Any, masks: Mapping[str, MaskMaker], rotary: nn.Module | None = None
    ) -> None:
        self._config = config
        self._masks = dict(masks)
        # Not a submodule of any layer: casting the model to bfloat16 would round the frequencies.
        self._rotary = rotary
        taken = inspect.signature(rotary.forward).parameters if rotary is not None else ()
        self._rotary_by_kind = "layer_type" in taken
        self._batch: tuple[Any, tuple[Tensor, ...], dict[str, Any]] = (None, (), {})

    def mask(self, kind: str, hidden: Tensor, sides: SideInputs) -> Any:
        """Return the mask for layers of a kind.

        Args:
            kind: A key of ``masks``.
            hidden: Hidden states, (batch, sequence, hidden); only shape, type and device matter.
            sides: The side inputs of this micro-batch.
        """
        results = self._of_batch(hidden, sides)
        key = f"mask of {kind}"
        if key not in results:
            results[key] = self._masks[kind](
                self._config, hidden, side(sides, "attention_mask"), side(sides, "position_ids")
            )
        return results[key]

    def position_ids(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Return the position ids: those of the batch, else 0, 1, 2, ... of shape (1, sequence)."""
        results = self._of_batch(hidden, sides)
        if "position ids" not in results:
            given = side(sides, "position_ids")
            default = torch.arange(hidden.shape[1], device=hidden.device)[None]
            results["position ids"] = default if given is None else given
        return results["position ids"]

    def row_bounds(self, hidden: Tensor, sides: SideInputs) -> dict[str, Any]:
        """Return the keyword arguments of `kernel_bounds` for the blocks of this process.

        Args:
            hidden: Hidden states, (batch, sequence, hidden).
            sides: The side inputs of this micro-batch.
        """
        results = self._of_batch(hidden, sides)
        if "row bounds" not in results:
            given = side(sides, "position_ids"), side(sides, "attention_mask")
            results["row bounds"] = kernel_bounds(self._config, *given)
        return results["row bounds"]

    def rotary(self, kind: str, hidden: Tensor, sides: SideInputs) -> Any:
        """Return the cosine and sine tables for layers of a kind; None if the model has none.

        Args:
            kind: Of the layer, as in ``config.layer_types``.
            hidden: (batch, sequence, width), whose type and device the tables get.
            sides: The batch entries that travel with it.
        """
        if self._rotary is None:
            return None
        arguments = (kind,) if self._rotary_by_kind else ()
        key = f"rotary {arguments}"
        results = self._of_batch(hidden, sides)
        if key not in results:
            positions = self.position_ids(hidden, sides)
            self._rotary.to(hidden.device)
            results[key] = self._rotary(hidden, positions, *arguments)
        return results[key]

    def _of_batch(self, hidden: Tensor, sides: SideInputs) -> dict[str, Any]:
        # Tensors made under inference mode cannot be used by autograd later, hence the entry.
        inference = torch.is_inference_mode_enabled()
        settings = (getattr(self._config, name, None) for name in _OF_MASKS)
        properties = (hidden.shape[:2], hidden.dtype, hidden.device, inference, *settings)
        tensors = tuple(sides.values())
        key = (properties, [id(tensor) for tensor in tensors])
        if self._batch[0] != key:
            # Holding the tensors keeps their identities from being reused.
            self._batch = key, tensors, {}
        return self._batch[2]


def split_batch(
    batch: Mapping[str, Tensor],
    inputs: Sequence[str],
    *,
    labels_required: bool = True,
    accepted: Sequence[str] | None = None,
) -> tuple[Tensor | tuple[Tensor, ...], Tensor | tuple[()]]:
    """Order a batch's entries as the pipeline expects them.

    What the batch does not have, the model does not get: an empty tensor stands in its place. An
    undeclared ``attention_mask`` of all ones is dropped, where it means nothing, and so are
    options that are None, False or 0.

    Args:
        batch: Entries by name, integers of shape (batch, sequence), and ``labels``.
        inputs: The declared names, ``input_ids`` first.
        labels_required: Whether a batch without labels is an error; else an empty tuple stands
            for them.
        accepted: Names that may be declared; any if omitted.

    Returns:
        The inputs (a bare tensor if only ``input_ids`` is declared, else a tuple of int64 tensors)
        and the labels.

    Raises:
        ModelError: ``input_ids`` or ``labels`` is missing, an entry is not declared, is no tensor,
            or has another shape than ``input_ids``.
    """
    idle = {n for n, v in batch.items() if v is None or (isinstance(v, int) and not v)}
    batch = {name: value for name, value in batch.items() if name not in idle}
    for name in ("input_ids", "labels") if labels_required else ("input_ids",):
        if name not in batch:
            raise ModelError(
                name, None, "the batch has no such entry", f"Let the collator return {name!r}"
            )
    for name, value in batch.items():
        _check_declared(name, value, inputs, batch.get("position_ids"), accepted)
    ids = batch["input_ids"]
    tensors = []
    for name in inputs:
        if name not in batch:
            tensors.append(torch.empty(0, dtype=torch.int64, device=ids.device))
            continue
        value = batch[name]
        if value.shape != ids.shape or value.ndim != _BATCH_NDIM:
            raise ModelError(
                name,
                tuple(value.shape),
                f"it is not of shape (batch, sequence) like input_ids {tuple(ids.shape)}",
                "Give one integer for each token",
            )
        tensors.append(value.to(torch.int64).contiguous())
    return (tensors[0] if len(tensors) == 1 else tuple(tensors)), batch.get("labels", ())


def _check_declared(
    name: str,
    value: Any,
    inputs: Sequence[str],
    positions: Tensor | None,
    accepted: Sequence[str] | None,
) -> None:
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if shape is None and name in inputs:
        reason = "it is no tensor, and stages send each other nothing else"
        raise ModelError(name, type(value).__name__, reason, "Let the collator return a tensor")
    if name in inputs or name == "labels":
        return
    if shape and name == "attention_mask" and bool((value == 1).all()):
        # Without a mask, positions that begin anew keep the rows of a packed sample apart.
        if positions is None or not bool((positions[..., 1:] == 0).any()):
            return
        raise ModelError(
            name,
            shape,
            "position_ids begin anew, and with this mask of ones rows would see each other in the "
            "model, but not in the pipeline, which does not carry it",
            f"{_declared([*inputs, name])}, or drop it from the batch",
        )
    remedy = "Drop it from the batch: the layers of this model take no such entry"
    if accepted is None or name in accepted:
        remedy = f"{_declared([*inputs, name])}, or drop it from the batch"
    reason = f"the pipeline carries only {', '.join(inputs)}, so this entry would be ignored"
    raise ModelError(name, type(value).__name__ if shape is None else shape, reason, remedy)


def _declared(inputs: list[str]) -> str:
    given = json.dumps(inputs)
    return f"Declare it: set wavemare.pipeline.inputs to {given} (to_pipeline: inputs={given})"
