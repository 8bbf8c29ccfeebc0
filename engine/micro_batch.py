# SPDX-License-Identifier: Apache-2.0
"""A micro-batch on its way through one stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["MicroBatch", "as_tuple", "moved"]

Tensors = Tensor | tuple[Tensor, ...]


@dataclass
class MicroBatch:
    """What a stage holds of a micro-batch between its forward and its backward pass.

    Args:
        inputs: What the first layer gets; leaves.
        ended: Whether this is only the notice that the data has ended.
        source: Number of the iterator that it came from.
        batch: As it was read, on the first stage: it may have to be given back.
        labels: On the last stage.
        outputs: For the next stage.
        loss: On the last stage; scalar.
        grads: Of the outputs, from the next stage.
        version: Of the weights that the forward pass used.
    """

    inputs: Tensors = ()
    ended: bool = False
    source: int = 0
    batch: Any = None
    labels: Any = None
    outputs: Tensors = ()
    loss: Any = None
    grads: list[Tensor] = field(default_factory=list)
    version: int = 0

    @property
    def differentiable_outputs(self) -> list[Tensor]:
        """The outputs that the next stage sends gradients of."""
        return [t for t in as_tuple(self.outputs) if t.is_floating_point()]

    def backward(self) -> None:
        """Accumulate the weights' gradients, given those of the outputs."""
        pairs = zip(self.differentiable_outputs, self.grads, strict=True)
        used = [(output, grad) for output, grad in pairs if output.requires_grad]
        torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])

    def input_grads(self) -> list[Tensor]:
        """Return the gradients of the floating-point inputs, zero where none flowed."""
        floating = [t for t in as_tuple(self.inputs) if t.is_floating_point()]
        return [t.grad if t.grad is not None else torch.zeros_like(t) for t in floating]

    def free_graph(self) -> None:
        """Let the activations go; the inputs and their gradients stay."""
        self.outputs, self.loss, self.labels, self.grads = (), None, None, []


def as_tuple(tensors: Any) -> tuple[Tensor, ...]:
    """Return one tensor, or a tuple or list of them, as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def moved(tensors: Any, device: torch.device) -> Any:
    """Return one tensor, or a tuple or list of them, on a device; anything else as it is."""
    if isinstance(tensors, Tensor):
        return tensors.detach().to(device)
    if isinstance(tensors, (tuple, list)):
        return tuple(tensor.detach().to(device) for tensor in tensors)
    return tensors
