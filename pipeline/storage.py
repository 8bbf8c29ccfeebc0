"""The memory behind a stage's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from wavemare.errors import ModelError

__all__ = ["distinct", "size_bytes", "swap"]

_PIECE_BYTES = 1 << 20
"""Contents are swapped in pieces of this size, so that the temporary stays in a core's cache."""


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
    for a, b in _pieces(left, right):
        held = a.clone()
        a.copy_(b)
        b.copy_(held)


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


def _pieces(left: Sequence[Tensor], right: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(left, right, strict=True):
        if a.nbytes > _PIECE_BYTES and a.is_contiguous() and b.is_contiguous():
            length = _PIECE_BYTES // a.element_size()
            yield from zip(a.view(-1).split(length), b.view(-1).split(length), strict=True)
        else:
            yield a, b
