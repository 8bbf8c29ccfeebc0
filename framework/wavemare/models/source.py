# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights lie: names, shapes, and parts that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A weight that has not been read.

    Attributes:
        shape: Of the whole tensor.
        dtype: As it is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Weights by name; nothing is kept in memory."""

    @property
    def stored(self) -> Mapping[str, Stored]:
        """The weights, in the order in which they are best read."""

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight, or the part of it that slices of its first dimensions name.

        Raises:
            KeyError: There is no such weight.
            CheckpointError: Its file is damaged.
        """


class MemorySource:
    """The weights of a state dict.

    Args:
        state: Tensors by name.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.stored: Mapping[str, Stored] = {
            name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight or its part, which shares memory with the state dict's."""
        return self._state[name].detach()[index]


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and the last element, and one more, that an index takes of each dimension.

    Args:
        index: Slices of the first dimensions, of neighbouring elements.
        shape: Of the tensor.
    """
    whole = (*index, *[slice(None)] * (len(shape) - len(index)))
    found = []
    for part, size in zip(whole, shape, strict=True):
        first, last, _ = part.indices(size)
        found.append((first, max(first, last)))
    return found
