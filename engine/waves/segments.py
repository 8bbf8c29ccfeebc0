# SPDX-License-Identifier: Apache-2.0
"""A model as a row of segments: what the wave executor runs, and where collectives stand in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Carry", "Segment", "Segments"]

Carry = tuple[Tensor, ...]
"""What passes from segment to segment: floating-point tensors, through which gradients flow, and
others (masks, positions), handed on unchanged."""


@dataclass(frozen=True)
class Segment:
    """A part of a model that is differentiated by itself.

    Args:
        name: For messages and timelines.
        run: From a carry to the next one. It uses nothing that another segment has computed but
            what is in its carry.
        sums_output: The first tensor of its output is this rank's part of a sum over the ranks of
            `Segments.group`; the executor sums it before the next segment runs.
        sums_gradient: The same of the gradient of its input's first tensor.
    """

    name: str
    run: Callable[[Carry], Carry]
    sums_output: bool = False
    sums_gradient: bool = False


@dataclass(frozen=True)
class Segments:
    """A model from a batch to its loss, or one stage of a pipeline.

    Args:
        split: From a batch to the first carry and the labels.
        body: All segments but the head, in their order.
        head: From the body's carry and the labels to the mean loss, scalar; None if another stage
            goes on with the last carry, and gives its gradient.
        head_sums_gradient: As `Segment.sums_gradient`, of the head.
        continues: Whether the first carry comes from another stage, which wants its gradient.
        group: Ranks over which the segments' collectives sum; None where there are none.
    """

    split: Callable[[Any], tuple[Carry, Any]]
    body: tuple[Segment, ...]
    head: Callable[[Carry, Any], Tensor] | None
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
