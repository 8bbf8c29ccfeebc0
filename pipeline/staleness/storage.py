# SPDX-License-Identifier: Apache-2.0
"""The memory behind a stage's parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from wavemare.errors import ModelError

_Layout = tuple[int, torch.Size, tuple[int, ...]]


def distinct(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the trainable parameters without those in the memory of another one.

    Of tied parameters, and of a flat buffer and its views, one remains.

    Raises:
        ModelError: Two parameters share a part of their memory, or one is not contiguous in some
            order of its dimensions.
    """
    trainable = [p for p in parameters if p.requires_grad and p.numel()]
    spans = [_span(p) for p in trainable]
    kept: list[int] = []
    # The longest one at an address comes first.
    for index in sorted(range(len(spans)), key=lambda i: (*spans[i][:2], -spans[i][2])):
        device, start, end = spans[index]
        last_device, _, last_end = spans[kept[-1]] if kept else ("", 0, 0)
        shape, reason = tuple(trainable[index].shape), None
        if end - start != trainable[index].nbytes:
            reason = "a trainable parameter of this shape has gaps or repeats in its memory"
        elif device != last_device or start >= last_end:
            kept.append(index)
        elif end > last_end:
            reason = "a trainable parameter of this shape shares a part of another one's memory"
        if reason is not None:
            raise ModelError("parameters", shape, reason, "Give each of them memory of its own")
    return [trainable[index] for index in sorted(kept)]


class References:
    """Lets autograd save which part of which parameter a view is, instead of its contents.

    The backward pass uses that part of the parameter's ``.data`` at that time. Other hooks of saved
    tensors inside the context go first.

    Args:
        parameters: Without shared memory; see `distinct`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._layouts: list[_Layout] = []
        self._spans: list[tuple[int, Tensor]] = []
        self._starts: list[int] = []

    def kept(self) -> saved_tensors_hooks:
        """Return the context of a forward pass.

        A layer that saves more than a part of one parameter gets a `ModelError`. Autograd does not
        notice in-place changes of saved tensors, as with all hooks.
        """
        self.find()
        return saved_tensors_hooks(self.of, resolve)

    def find(self) -> None:
        """Look up the present addresses of the parameters."""
        layouts = [(p.data_ptr(), p.size(), p.stride()) for p in self._parameters]
        if layouts != self._layouts:
            spans = sorted((_span(p)[1:], index) for index, p in enumerate(self._parameters))
            self._layouts = layouts
            self._starts = [start for (start, _), _ in spans]
            self._spans = [(end, self._parameters[index]) for (_, end), index in spans]

    def of(self, tensor: Tensor) -> Tensor | Reference:
        """Return the parameter, the reference to a part of one, or the tensor itself.

        Raises:
            ModelError: It is more than a part of one parameter, or has another type.
        """
        if tensor.layout is not torch.strided:
            return tensor.detach()
        start = tensor.data_ptr()
        index = bisect_right(self._starts, start)
        if index < len(self._starts) and _ends_behind(tensor, start, self._starts[index]):
            _refuse(tensor)
        if not index or start >= self._spans[index - 1][0]:
            # Detached, to avoid a reference cycle with the graph node that saves it.
            return tensor.detach()
        end, parameter = self._spans[index - 1]
        same_form = tensor.dtype == parameter.dtype and not tensor.is_conj()
        if not same_form or _ends_behind(tensor, start, end):
            _refuse(tensor)
        size, stride, first = tensor.size(), tensor.stride(), self._starts[index - 1]
        if size == parameter.size() and stride == parameter.stride():
            return parameter
        return Reference(parameter, size, stride, (start - first) // tensor.element_size())


class Reference(NamedTuple):
    """A view of a part of a parameter; sizes, strides and offset in elements."""

    parameter: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def resolve(kept: Tensor | Reference) -> Tensor:
    """Return the present contents of a result of `References.of`."""
    if isinstance(kept, Tensor):
        return kept
    data = kept.parameter.data
    return data.as_strided(kept.size, kept.stride, data.storage_offset() + kept.offset)


def same_layout(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same places."""
    if left.stride() == right.stride():
        return True
    steps = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(a == b for size, a, b in steps if size > 1)


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device and the first and one-behind-last byte of a tensor."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (reach + 1) * tensor.element_size()


def _ends_behind(tensor: Tensor, start: int, limit: int) -> bool:
    # Where an element is repeated, as in expanded tensors, there is less memory than elements.
    return start + tensor.nbytes > limit and _span(tensor)[2] > limit


def _refuse(tensor: Tensor) -> NoReturn:
    reason = (
        f"a layer keeps a tensor of this shape and {tensor.dtype} for its backward pass, which is "
        "more than a part of one parameter or has its elements in another form"
    )
    remedy = 'Give the layer memory of its own, or set the discrepancy correction to "off"'
    raise ModelError("parameters", tuple(tensor.shape), reason, remedy)
