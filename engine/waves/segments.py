# SPDX-License-Identifier: Apache-2.0
"""A model as a row of segments for the wave executor, with its collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Activations", "Segment", "Segments"]

Activations = tuple[Tensor, ...]
"""Tensors between segments: floating-point ones, with gradients, and others (masks, positions) that
are passed on unchanged."""


@dataclass(frozen=True)
class Segment:
    """A part of a model that is differentiated by itself.

    Args:
        name: For messages and timelines.
        run: From its input activations to its output. Of other segments' results it may use only
            its input.
        sums_output: The first output tensor is this rank's part of a sum over `Segments.group`; the
            executor sums it before the next segment runs.
        sums_gradient: The same for the gradient of the first input tensor.
    """

    name: str
    run: Callable[[Activations], Activations]
    sums_output: bool = False
    sums_gradient: bool = False


@dataclass(frozen=True)
class Segments:
    """A model from a batch to its loss, or one stage of a pipeline.

    Args:
        split: From a batch to the first activations and the labels.
        body: All segments but the head, in order.
        head: From the body's output and the labels to the mean loss, scalar; None if the next stage
            takes the output and returns its gradient.
        head_sums_gradient: As `Segment.sums_gradient`, of the head.
        continues: Whether the first activations come from a stage that needs their gradient.
        group: Ranks over which the segments' collectives sum; None where there are none.
    """

    split: Callable[[Any], tuple[Activations, Any]]
    body: tuple[Segment, ...]
    head: Callable[[Activations, Any], Tensor] | None
    head_sums_gradient: bool = False
    continues: bool = False
    group: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all segments, the head's last."""
        head = () if self.head is None else ("head",)
        return (*(segment.name for segment in self.body), *head)

    @property
    def sums_output(self) -> tuple[bool, ...]:
        """Of each segment, the head's last."""
        head = () if self.head is None else (False,)
        return (*(segment.sums_output for segment in self.body), *head)

    @property
    def sums_gradient(self) -> tuple[bool, ...]:
        """Of each segment, the head's last."""
        head = () if self.head is None else (self.head_sums_gradient,)
        return (*(segment.sums_gradient for segment in self.body), *head)
