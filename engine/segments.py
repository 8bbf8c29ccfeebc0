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
    """A model from a batch to its loss.

    Args:
        split: From a batch to the first carry and the labels.
        body: All segments but the last one, in their order.
        head: From the body's carry and the labels to the mean loss, scalar.
        head_sums_gradient: As `Segment.sums_gradient`, of the head.
        group: Ranks over which the segments' collectives sum; None where there are none.
    """

    split: Callable[[Any], tuple[Carry, Any]]
    body: tuple[Segment, ...]
    head: Callable[[Carry, Any], Tensor]
    head_sums_gradient: bool = False
    group: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all segments, the head's last."""
        return (*(segment.name for segment in self.body), "head")
