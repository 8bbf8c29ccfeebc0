# SPDX-License-Identifier: Apache-2.0
"""Weights that lie in several pieces: a read touches only the pieces and the rows that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wavemare.errors import CheckpointError
from wavemare.megatron.arrays import DAMAGED, Array, Held
from wavemare.models.source import Span, Stored, bounds


@dataclass(frozen=True)
class Box:
    """A piece of a weight.

    Attributes:
        first: Its first index in the weight.
        shape: Its extent there.
        open: Returns where it lies.
        index: The part of that which it is.
        copies: Return other places of the same piece, which must hold the same.
        turn: Changes the order of its rows once it has been read; the shape stays.
    """

    first: tuple[int, ...]
    shape: tuple[int, ...]
    open: Callable[[], Array | Held]
    index: tuple[int | slice | None, ...] = ()
    copies: tuple[Callable[[], Array | Held], ...] = ()
    turn: Callable[[Tensor], Tensor] | None = None

    def of_expert(self, expert: int) -> Box:
        """Return the same piece in a weight that counts experts first."""
        first, shape = (expert, *self.first), (1, *self.shape)
        return replace(self, first=first, shape=shape, index=(None, *self.index))

    def read(self, name: str, wanted: tuple[slice, ...]) -> Tensor:
        """Return a part of the piece.

        Raises:
            CheckpointError: It is damaged, or its copies differ.
        """
        read: list[Tensor] = []
        for place in (self.open, *self.copies):
            array = self._array(name, place)
            part = array.read() if self.turn else array.part(wanted).read()
            if read and not torch.equal(part, read[0]):
                reason = f"ranks hold different values of {name}, where all hold the same"
                raise CheckpointError("checkpoint", str(array.file), reason, DAMAGED)
            read.append(part)
        return self.turn(read[0])[wanted] if self.turn else read[0]

    def span(self, name: str, whole: Stored) -> Span | None:
        """Return where the piece's bytes lie; None if the weight has them apart, or it is turned.

        Raises:
            CheckpointError: It is damaged.
        """
        ahead = next((axis for axis, size in enumerate(self.shape) if size != 1), 0) + 1
        if self.copies or self.turn or self.shape[ahead:] != whole.shape[ahead:]:
            return None
        array = self._array(name, self.open)
        return array.span if array.dtype is whole.dtype else None

    def _array(self, name: str, place: Callable[[], Array | Held]) -> Array | Held:
        array = place().part(self.index)
        if array.shape != self.shape:
            reason = f"{name} has a piece of shape {array.shape} in place of {self.shape}"
            raise CheckpointError("checkpoint", str(array.file), reason, DAMAGED)
        return array


class Assembled:
    """A `WeightSource` over pieces.

    Args:
        where: The checkpoint, for errors.
        stored: The weights, in the order in which they are best read.
        boxes: The pieces of each.
    """

    def __init__(
        self, where: str, stored: Mapping[str, Stored], boxes: Mapping[str, Sequence[Box]]
    ) -> None:
        self.stored = stored
        self._where, self._boxes = where, boxes
        self._checked: set[str] = set()

    def check(self) -> None:
        """Check that the pieces of each weight make up the whole of it.

        Raises:
            CheckpointError: A piece is missing, or two are of the same place.
        """
        for name in self.stored:
            self._check(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a weight, or the part of it that slices of its first dimensions name.

        Raises:
            KeyError: There is no such weight.
            CheckpointError: A piece is missing or damaged.
        """
        stored = self.stored[name]
        self._check(name)
        wanted = bounds(index, stored.shape)
        result = torch.empty([last - first for first, last in wanted], dtype=stored.dtype)
        for box in self._boxes[name]:
            common = [
                (max(first, at), min(last, at + size))
                for (first, last), at, size in zip(wanted, box.first, box.shape, strict=True)
            ]
            if any(last <= first for first, last in common):
                continue
            piece = box.read(name, _slices(common, box.first))
            if piece.dtype != stored.dtype:
                reason = f"{name} has a piece of {piece.dtype} in place of {stored.dtype}"
                raise CheckpointError("checkpoint", self._where, reason, DAMAGED)
            if common == wanted:
                return piece.contiguous()
            result[_slices(common, [first for first, _ in wanted])].copy_(piece)
        return result

    def spans(self, name: str) -> Sequence[Span] | None:
        """Return the places of a weight's bytes; see `Placed`."""
        self._check(name)
        found = []
        for box in sorted(self._boxes[name], key=lambda box: box.first):
            span = box.span(name, self.stored[name])
            if span is None:
                return None
            found.append(span)
        return found

    def _check(self, name: str) -> None:
        if name in self._checked:
            return
        shape = self.stored[name].shape
        problem = _gap([(box.first, box.shape) for box in self._boxes[name]], shape, 0)
        if problem and 0 not in shape:
            reason = f"{problem} of {name}, whose shape is {tuple(shape)}"
            raise CheckpointError("checkpoint", self._where, reason, DAMAGED)
        self._checked.add(name)


def _slices(limits: Sequence[tuple[int, int]], start: Sequence[int]) -> tuple[slice, ...]:
    """Return an index from where something starts."""
    return tuple(slice(a - at, b - at) for (a, b), at in zip(limits, start, strict=True))


def _gap(
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...], axis: int
) -> str:
    """Return what is wrong with pieces that should tile a weight; empty if nothing is.

    They are those of ranks, which share out one dimension, then each part along the next.
    """
    if axis == len(shape):
        return "" if len(boxes) == 1 else "there are two pieces of one place"
    groups: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for box in boxes:
        groups.setdefault((box[0][axis], box[1][axis]), []).append(box)
    position = 0
    for first, size in sorted(groups):
        if first > position:
            break
        if first < position:
            return "there are two pieces of one place"
        problem = _gap(groups[first, size], shape, axis + 1)
        if problem:
            return problem
        position += size
    return (
        ""
        if position == shape[axis]
        else f"there is no piece for index {position} in dimension {axis}"
    )
