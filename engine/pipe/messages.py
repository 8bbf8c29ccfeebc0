# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbouring stages: one flat buffer each, received ahead, sent in the back.

A message is a header of numbers followed by tensors. What one stage has to tell another (the loss,
gradient norms, that the data ended) travels in the headers of the activations and gradients that
are sent anyway, so that no rank waits for anything else.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from wavemare.errors import ModelError

__all__ = [
    "DESCRIPTION",
    "Inbox",
    "Layout",
    "Outbox",
    "read_header",
    "write_message",
]

_ALIGNMENT = 64  # bytes; a view of another type must begin at a multiple of its size
_NUMBER = 8  # bytes of a float64
_EXIT_S = 60.0  # for what is under way when the process ends
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class Layout:
    """What a message holds.

    Args:
        numbers: Length of the header, in float64.
        shapes: Shape of each tensor.
        dtypes: Type of each tensor.
        single: Whether the sender had one bare tensor rather than a tuple.
    """

    numbers: int
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    single: bool = False

    @classmethod
    def of(cls, numbers: int, tensors: Tensor | Sequence[Tensor]) -> Layout:
        """Describe a header and tensors."""
        single = isinstance(tensors, Tensor)
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        shapes = tuple(tuple(tensor.shape) for tensor in listed)
        return cls(numbers, shapes, tuple(tensor.dtype for tensor in listed), single)

    @property
    def offsets(self) -> list[int]:
        """Where each tensor begins, and the message's length at the end; in bytes."""
        offsets = [_aligned(self.numbers * _NUMBER)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            offsets.append(offsets[-1] + _aligned(torch.Size(shape).numel() * dtype.itemsize))
        return offsets

    @property
    def size(self) -> int:
        """Length of the message in bytes."""
        return self.offsets[-1]

    def tensors(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message, as views of it."""
        views = []
        for start, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=False):
            length = torch.Size(shape).numel() * dtype.itemsize
            views.append(message[start : start + length].view(dtype).view(shape))
        return views

    def describe(self) -> list[float]:
        """Return the layout as numbers, for a message of its own; see `DESCRIPTION`.

        Raises:
            ModelError: There are more tensors or dimensions than such a message holds.
        """
        numbers: list[float] = [len(self.shapes), float(self.single)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if dtype not in _DTYPES:
                raise ModelError(
                    "activations", dtype, "stages cannot send each other this type", "Cast it"
                )
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        if len(numbers) > DESCRIPTION.numbers:
            reason = f"their shapes take {len(numbers)} numbers to describe"
            remedy = f"Send fewer tensors; there is room for {DESCRIPTION.numbers} numbers"
            raise ModelError("activations", self.shapes, reason, remedy)
        return numbers

    @classmethod
    def described(cls, description: Sequence[float], numbers: int) -> Layout:
        """Return the layout that `describe` turned into numbers."""
        values = iter(int(number) for number in description)
        count, single = next(values), bool(next(values))
        shapes, dtypes = [], []
        for _ in range(count):
            dtypes.append(_DTYPES[next(values)])
            shapes.append(tuple(next(values) for _ in range(next(values))))
        return cls(numbers, tuple(shapes), tuple(dtypes), single)


DESCRIPTION = Layout(256)
"""Layout of the message that tells the receiver another message's layout."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def write_message(
    layout: Layout, header: Sequence[float], tensors: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return a message, (bytes,) uint8 on ``device``; the place of missing tensors stays empty."""
    message = torch.empty(layout.size, dtype=torch.uint8, device=device)
    numbers = torch.tensor(header, dtype=torch.float64)
    message[: numbers.numel() * _NUMBER].view(torch.float64).copy_(numbers)
    for place, tensor in zip(layout.tensors(message), tensors, strict=False):
        place.copy_(tensor)
    return message


def read_header(layout: Layout, message: Tensor) -> list[float]:
    """Return the numbers at a message's beginning."""
    numbers: list[float] = message[: layout.numbers * _NUMBER].view(torch.float64).tolist()
    return numbers


_left_behind: list[deque[tuple[Tensor, Any]]] = []
"""What was under way when its `Outbox` went: gloo drops a message that nobody holds, and the
receiver, which may be behind, would wait for it for ever. At most ``slots`` of each."""

_outboxes: weakref.WeakSet[Outbox] = weakref.WeakSet()


class Outbox:
    """Sends to one rank without waiting.

    What is under way arrives also if the outbox goes, or the process by the interpreter's end,
    which waits for it up to a minute.

    Args:
        rank: The receiver's global rank.
        group: A group of the two ranks, for this direction alone.
        slots: How many messages may be under way; a further one waits for the oldest.
    """

    def __init__(self, rank: int, group: Any, slots: int) -> None:
        self._rank = rank
        self._group = group
        self._slots = slots
        self._under_way: deque[tuple[Tensor, Any]] = deque()
        _outboxes.add(self)
        weakref.finalize(self, _leave_behind, self._under_way).atexit = False

    def send(self, message: Tensor) -> None:
        """Send a message, which must not be changed any more."""
        while len(self._under_way) >= self._slots:
            self._under_way.popleft()[1].wait()
        work = torch.distributed.isend(message, self._rank, group=self._group)
        self._under_way.append((message, work))

    def flush(self) -> None:
        """Wait until all messages have gone."""
        while self._under_way:
            self._under_way.popleft()[1].wait()


def _leave_behind(under_way: deque[tuple[Tensor, Any]]) -> None:
    if under_way:
        _left_behind.append(under_way)


@atexit.register
def _flush_at_exit() -> None:
    """Give receivers that are behind the time to take what was sent, unless they have gone."""
    until = time.monotonic() + _EXIT_S
    for under_way in [*_left_behind, *(outbox._under_way for outbox in _outboxes)]:
        with contextlib.suppress(RuntimeError):  # the receiver has gone, or does not take it
            for _, work in under_way:
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))


class Inbox:
    """Receives from one rank, with the next receives posted before they are needed.

    Args:
        rank: The sender's global rank.
        group: A group of the two ranks, for this direction alone.
        device: Where messages are put.
    """

    def __init__(self, rank: int, group: Any, device: torch.device) -> None:
        self._rank = rank
        self._group = group
        self._device = device
        self._posted: deque[tuple[Tensor, Any]] = deque()

    @property
    def posted(self) -> int:
        """How many receives are posted."""
        return len(self._posted)

    def post(self, size: int) -> None:
        """Post the receive of a further message of ``size`` bytes."""
        message = torch.empty(size, dtype=torch.uint8, device=self._device)
        work = torch.distributed.irecv(message, self._rank, group=self._group)
        self._posted.append((message, work))

    def take(self) -> Tensor:
        """Wait for the message whose receive was posted first and return it."""
        message, work = self._posted.popleft()
        work.wait()
        return message
