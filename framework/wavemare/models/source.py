# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights lie: names, shapes, and parts that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from wavemare.errors import ModelError

COPIED_BYTES = 2**20
"""A smaller weight is read as fast as it is found."""


@dataclass(frozen=True)
class Stored:
    """A weight that has not been read.

    Attributes:
        shape: Of the whole tensor.
        dtype: As it is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Span:
    """A part of a file.

    Attributes:
        file: The file.
        start: Its first byte.
        length: In bytes.
    """

    file: Path
    start: int
    length: int


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


@runtime_checkable
class Placed(WeightSource, Protocol):
    """A source that knows where its weights lie."""

    def spans(self, name: str) -> Sequence[Span] | None:
        """Return the places of a weight's bytes, in the order of its elements.

        None if its bytes stand nowhere in this order and type: it has to be read.

        Raises:
            KeyError: There is no such weight.
            CheckpointError: Its file is damaged.
        """


def spans_of(source: WeightSource, name: str) -> Sequence[Span] | None:
    """Return the places of a weight's bytes; None if it has to be read."""
    found = source.spans(name) if isinstance(source, Placed) else None
    if found is not None and sum(span.length for span in found) != size_of(source.stored[name]):
        return None
    return found


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


class Zeros:
    """Weights that are all zero, until the load of a checkpoint replaces them.

    Args:
        stored: The weights.
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight or its part; nobody may write into it."""
        stored = self.stored[name]
        return torch.zeros((), dtype=stored.dtype).expand(stored.shape)[index]


class Ahead:
    """Weights of a source, the next of which is read while a caller works with the last.

    Two of them are in memory. A large one whose bytes lie in files is not read: `spans` tells where
    they are. Leave the context to end the thread.

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
        self._spans: dict[str, Sequence[Span] | None] = {}

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
        self._read_following(name)
        return found

    def spans(self, name: str) -> Sequence[Span] | None:
        """Return the places of a large weight's bytes; see `Placed`."""
        found = self._find(name)
        if found is not None:
            del self._spans[name]
            self._read_following(name)
        return found

    def _read_following(self, name: str) -> None:
        following = self._following.get(name)
        if self._next is None and following is not None and self._find(following) is None:
            self._next = following, self._pool.submit(self._source.read, following)

    def _find(self, name: str) -> Sequence[Span] | None:
        if name not in self._spans:
            is_large = size_of(self.stored[name]) >= COPIED_BYTES
            self._spans[name] = spans_of(self._source, name) if is_large else None
        return self._spans[name]


class Cast:
    """A source's weights, with the floating-point ones in another type.

    Args:
        source: The weights.
        dtype: The type.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self.stored: Mapping[str, Stored] = {
            name: Stored(own.shape, dtype if own.dtype.is_floating_point else own.dtype)
            for name, own in source.stored.items()
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight or its part; see `WeightSource`.

        Raises:
            ModelError: A number of it is out of the type's range.
        """
        return cast(name, self._source.read(name, index), self.stored[name].dtype)

    def spans(self, name: str) -> Sequence[Span] | None:
        """Return the places of the bytes of a weight that stays as it is; see `Placed`."""
        is_same = self.stored[name] == self._source.stored[name]
        return spans_of(self._source, name) if is_same else None


def size_of(stored: Stored) -> int:
    """Return the bytes of a tensor."""
    return prod(stored.shape) * stored.dtype.itemsize


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
        and not torch.isfinite(found).all()
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
