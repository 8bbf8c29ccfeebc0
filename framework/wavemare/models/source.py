# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights lie: names, shapes, and parts that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from wavemare.errors import ModelError


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


class Ahead:
    """Weights of a source, the next of which is read while a caller works with the last.

    Two of them are in memory. Leave the context to end the thread.

    Args:
        source: Whole weights are asked for in its order, as far as possible.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.stored: Mapping[str, Stored] = source.stored
        names = list(self.stored)
        self._following = dict(pairwise(names))
        self._pool = ThreadPoolExecutor(1, "weights")
        self._next: tuple[str, Future[Tensor]] | None = None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight or its part; see `WeightSource`."""
        ready, self._next = self._next, None
        if ready is not None and ready[0] == name and not index:
            found = ready[1].result()
        else:
            if ready is not None:
                wait([ready[1]])  # a source is used by one thread at a time
            found = self._source.read(name, index)
        following = self._following.get(name)
        if following is not None:
            self._next = following, self._pool.submit(self._source.read, following)
        return found


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in another type.

    Args:
        name: Of the weight.
        tensor: The weight or its part.
        dtype: The type.

    Raises:
        ModelError: A number of it is out of the type's range and would become infinite.
    """
    found = tensor.to(dtype)
    if not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        return found
    if (
        torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
        and (torch.isfinite(tensor) & ~torch.isfinite(found)).any()
    ):
        largest = tensor[torch.isfinite(tensor)].abs().max().item()
        kind = str(dtype).removeprefix("torch.")
        reason = f"its number {largest:.3g} is out of the range of {kind}"
        other = "bfloat16" if dtype is not torch.bfloat16 else "float32"
        raise ModelError("weight", name, reason, f"Use {other}")
    return found


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
