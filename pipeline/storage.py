"""The memory behind a stage's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from wavemare.errors import ModelError

__all__ = ["distinct", "size_bytes", "swap"]

_HOST_BYTES = 1 << 18
"""What is exchanged at once in a host's memory: the temporary stays in a core's cache."""

_DEVICE_BYTES = 1 << 26
"""The same in a device's memory, where few and large operations are fast."""

_Piece = tuple[Tensor, Tensor]


def distinct(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the trainable parameters without those that lie in the memory of another one.

    Tied parameters, views of each other, and a flat buffer given along with its views are thus
    reached once; views of a buffer that is not given are left as they are.

    Raises:
        ModelError: Two parameters share a part of their memory.
    """
    trainable = [p for p in parameters if p.requires_grad and p.numel()]
    spans = [_span(p) for p in trainable]
    kept: list[int] = []

    def by_address(index: int) -> tuple[str, int, int]:
        device, start, end = spans[index]
        return device, start, -end  # of those that begin together the longest comes first

    for index in sorted(range(len(spans)), key=by_address):
        device, start, end = spans[index]
        last_device, _, last_end = spans[kept[-1]] if kept else ("", 0, 0)
        if device != last_device or start >= last_end:
            kept.append(index)
        elif end > last_end or not _covers(trainable[kept[-1]], trainable[index]):
            shape = tuple(trainable[index].shape)
            reason = "a trainable parameter of this shape shares a part of another one's memory"
            raise ModelError("parameters", shape, reason, "Give each of them memory of its own")
    return [trainable[index] for index in sorted(kept)]


def swap(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Exchange the contents of two lists of tensors, with a small temporary."""
    for group in _groups(_pieces(left, right)):
        ours, theirs = ([piece[side] for piece in group] for side in (0, 1))
        held = [torch.empty_like(tensor) for tensor in ours]
        torch._foreach_copy_(held, ours)
        torch._foreach_copy_(ours, theirs)
        torch._foreach_copy_(theirs, held)


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes the elements of the tensors take."""
    return sum(tensor.nbytes for tensor in tensors)


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device and the first and one-behind-last byte of a tensor."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (reach + 1) * tensor.element_size()


def _covers(outer: Tensor, inner: Tensor) -> bool:
    """Whether a tensor has all of the memory between its ends, or is the same view as another."""
    _, start, end = _span(outer)
    same = outer.shape == inner.shape and outer.stride() == inner.stride()
    return (same and start == inner.data_ptr()) or end - start == outer.nbytes


def _limit(tensor: Tensor) -> int:
    return _HOST_BYTES if tensor.device.type == "cpu" else _DEVICE_BYTES


def _pieces(left: Sequence[Tensor], right: Sequence[Tensor]) -> Iterator[_Piece]:
    """Yield pairs of tensors, those above the limit in parts."""
    for a, b in zip(left, right, strict=True):
        if a.nbytes > _limit(a) and a.is_contiguous() and b.is_contiguous():
            length = _limit(a) // a.element_size()
            yield from zip(a.view(-1).split(length), b.view(-1).split(length), strict=True)
        else:
            yield a, b


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yield lists of pairs that stay below the limit together."""
    group: list[_Piece] = []
    total = 0
    for piece in pieces:
        if group and total + piece[0].nbytes > _limit(piece[0]):
            yield group
            group, total = [], 0
        group.append(piece)
        total += piece[0].nbytes
    if group:
        yield group
