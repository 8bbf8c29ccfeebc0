# SPDX-License-Identifier: Apache-2.0
"""What a message between two stages holds: a header of numbers, and tensors.

It is one flat buffer. The header carries all other information between stages (the loss, gradient
norms, the end of the data), so that no rank waits for anything but activations and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from wavemare.engine.pipe.micro_batch import as_tuple
from wavemare.errors import ModelError

_ALIGNMENT = 64  # bytes; a view of another type must begin at a multiple of its size
_NUMBER = 8  # bytes of a float64
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
class MessageLayout:
    """The content of a message.

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
    def of(cls, numbers: int, tensors: Tensor | Sequence[Tensor]) -> MessageLayout:
        """Describe a header and tensors."""
        listed = as_tuple(tensors)
        shapes, dtypes = tuple(t.shape for t in listed), tuple(t.dtype for t in listed)
        return _layout(numbers, shapes, dtypes, isinstance(tensors, Tensor))

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins, then the message's length; in bytes."""
        offsets, end = [], self.numbers * _NUMBER
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = offsets[-1] + math.prod(shape) * dtype.itemsize
        return [*offsets, end]

    @property
    def size(self) -> int:
        """Length of the message in bytes."""
        return self.offsets[-1]

    @cached_property
    def _is_bare(self) -> bool:
        """Whether a message is one tensor itself, of a type that NCCL knows."""
        return not self.numbers and len(self.dtypes) == 1 and self.dtypes[0].is_floating_point

    def empty(self, device: torch.device) -> Tensor:
        """Return space for a message: (bytes,) uint8, or in the shape of its only tensor."""
        if self._is_bare:
            return torch.empty(self.shapes[0], dtype=self.dtypes[0], device=device)
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def pack(
        self, header: Sequence[float | Tensor], tensors: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Return a message on ``device``; missing tensors leave their space.

        A tensor alone is not copied. The host does not wait for numbers that are scalars on the
        device.
        """
        if self._is_bare:
            return tensors[0].detach().to(device).contiguous()
        message = self.empty(device)
        known = [0.0 if isinstance(number, Tensor) else number for number in header]
        numbers = message[: len(known) * _NUMBER].view(torch.float64)
        numbers.copy_(torch.tensor(known, dtype=torch.float64), non_blocking=True)
        for place, number in enumerate(header):
            if isinstance(number, Tensor):
                numbers[place] = number
        for space, tensor in zip(self.tensors(message), tensors, strict=False):
            space.copy_(tensor)
        return message

    def header(self, message: Tensor) -> list[float]:
        """Return the numbers of a message."""
        if not self.numbers:
            return []
        return message[: self.numbers * _NUMBER].view(torch.float64).tolist()

    def tensors(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message, as views of it."""
        if self._is_bare:
            return [message]
        views = []
        for start, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=False):
            length = math.prod(shape) * dtype.itemsize
            views.append(message[start : start + length].view(dtype).view(shape))
        return views

    def __str__(self) -> str:
        """Return shapes and types in words."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return ", ".join(f"{list(shape)} {str(t).removeprefix('torch.')}" for shape, t in pairs)

    def with_header(self, numbers: int) -> MessageLayout:
        """Return the layout of the same tensors behind a header of another length."""
        return _layout(numbers, self.shapes, self.dtypes, self.single)

    def describe(self) -> list[float]:
        """Return the layout as numbers, for a message of its own; see `DESCRIPTION`.

        Raises:
            ModelError: There are more tensors or dimensions than such a message holds.
        """
        numbers: list[float] = [len(self.shapes), float(self.single)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if dtype not in _DTYPES:
                reason = "stages cannot send each other this type"
                raise ModelError("activations", dtype, reason, "Cast it")
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        if len(numbers) > DESCRIPTION.numbers:
            reason = f"their shapes take {len(numbers)} numbers to describe"
            remedy = f"Send fewer tensors; there is room for {DESCRIPTION.numbers} numbers"
            raise ModelError("activations", self.shapes, reason, remedy)
        return numbers

    @classmethod
    def described(cls, description: Sequence[float]) -> MessageLayout:
        """Return the layout that `describe` turned into numbers."""
        values = iter(int(number) for number in description)
        count, single = next(values), bool(next(values))
        shapes, dtypes = [], []
        for _ in range(count):
            dtypes.append(_DTYPES[next(values)])
            shapes.append(tuple(next(values) for _ in range(next(values))))
        return _layout(0, tuple(shapes), tuple(dtypes), single)


@lru_cache(maxsize=256)
def _layout(
    numbers: int, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], single: bool
) -> MessageLayout:
    return MessageLayout(numbers, tuple(map(tuple, shapes)), dtypes, single)


DESCRIPTION = MessageLayout(256)
"""MessageLayout of the message that describes another message's layout."""
