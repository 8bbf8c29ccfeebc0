# SPDX-License-Identifier: Apache-2.0
"""Which elements of the weights a rank's optimizer steps, and in which tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Held:
    """Consecutive elements of a weight in a tensor that the basic optimizer steps.

    Attributes:
        weight: The model's.
        start: Index in the tensor of the first element.
        first: Index in the weight, flat, of that element.
        count: How many elements.
    """

    weight: Any
    start: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Stepped:
    """A tensor that the basic optimizer steps: a weight, or a flat copy of a part of several.

    Attributes:
        tensor: The tensor.
        group: The number of its parameter group.
        weights: All weights that it and its like on other ranks are made of, in their order.
        held: What this one has of them.
    """

    tensor: Any
    group: int
    weights: Sequence[Any]
    held: Sequence[Held]
