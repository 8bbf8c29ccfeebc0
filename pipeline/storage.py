"""The memory behind a stage's parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from wavemare.errors import ModelError

__all__ = ["distinct", "kept_as_references", "size_bytes"]


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


@contextmanager
def kept_as_references(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let autograd keep, of parameters and views of them, only which part of which one they are.

    The backward pass then takes that part of whatever ``.data`` the parameter has at the time.

    Args:
        parameters: Without shared memory; see `distinct`.
    """
    homes: dict[int, list[tuple[int, int, Tensor]]] = {}
    for parameter in parameters:
        _, start, end = _span(parameter)
        storage = parameter.untyped_storage().data_ptr()
        homes.setdefault(storage, []).append((start, end, parameter))
    for spans in homes.values():
        spans.sort(key=lambda span: span[0])

    def pack(tensor: Tensor) -> Tensor | _Reference:
        spans = homes.get(tensor.untyped_storage().data_ptr())
        if spans is None:
            return tensor
        place = tensor.data_ptr()
        index = bisect_right(spans, place, key=lambda span: span[0]) - 1
        start, end, parameter = spans[max(index, 0)]
        if not start <= place < end or tensor.dtype != parameter.dtype:
            return tensor
        offset = (place - start) // tensor.element_size()
        return _Reference(parameter, tensor.size(), tensor.stride(), offset)

    def unpack(kept: Tensor | _Reference) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept.resolve()

    with saved_tensors_hooks(pack, unpack):
        yield


class _Reference(NamedTuple):
    """A view of a parameter, by where it lies in it."""

    parameter: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def resolve(self) -> Tensor:
        """Return the view of the parameter's present contents."""
        data = self.parameter.data
        return data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)


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
