# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step whole matrices, also from ZeRO's flat partitions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from wavemare.errors import CheckpointError, ConfigError, ModelError, check_number

SIDES = 2
"""Of a matrix."""

State = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """One of the equal parts of ZeRO's concatenated tensors.

    Args:
        shapes: Of all tensors of the row, the same on all ranks.
        offsets: For each tensor the index of its first element in the row.
        begin: Index in the row of the partition's first element.
        size: Elements of every partition, padding included.
        group: The ranks that hold the partitions; None for all.
    """

    shapes: tuple[Shape, ...]
    offsets: tuple[int, ...]
    begin: int
    size: int
    group: Any = None

    def parts(self, is_matrix: Callable[[Shape], bool]) -> Iterator[tuple[int, _Part]]:
        """Yield, by the tensor's number in the row, what this partition holds of each."""
        cut = 0
        for number, (shape, offset) in enumerate(zip(self.shapes, self.offsets, strict=True)):
            count = math.prod(shape)
            place = None
            # Each rank counts all cut matrices, so that all agree on their places.
            if is_matrix(shape) and self._is_cut(offset, count):
                place, cut = cut, cut + count
            first = max(self.begin - offset, 0)
            last = min(self.begin + self.size - offset, count)
            if first < last:
                start = offset + first - self.begin
                yield number, _Part(shape, start, first, last - first, is_matrix(shape), place)

    def cut_elements(self, is_matrix: Callable[[Shape], bool]) -> int:
        """Return how many elements the matrices have that lie on several ranks."""
        sizes = [(s, o, math.prod(s)) for s, o in zip(self.shapes, self.offsets, strict=True)]
        return sum(n for s, o, n in sizes if is_matrix(s) and self._is_cut(o, n))

    def _is_cut(self, offset: int, count: int) -> bool:
        return offset // self.size != (offset + count - 1) // self.size


@dataclass(frozen=True)
class _Part:
    """The elements of a tensor in a partition."""

    shape: Shape  # of the tensor
    start: int  # index in the partition of the first element
    first: int  # index of that element in the tensor
    count: int
    is_matrix: bool  # whether it is stepped as a matrix, rather than element by element
    place: int | None  # of a matrix on several ranks, where it is assembled


class MatrixOptimizer(Optimizer, ABC):
    """An optimizer whose update of a matrix depends on all of its elements.

    Other tensors are stepped element by element. Weight decay is decoupled: ``w -= lr * (decay * w
    + update)``. States, and the arithmetic of parameters in 16 bits, are fp32.

    ZeRO 1 and 2 give an optimizer flat partitions instead of a model's tensors. With
    `set_partition`, it steps the matrices in a partition as in the model. One all-reduce per step
    and parameter group assembles the gradients of matrices that lie on several ranks; it is exact,
    as each element has one owner. Every owner computes the same update with its own state and
    applies its part. A step is therefore a collective of the data ranks.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._partitions: dict[Tensor, Partition] = {}

    @abstractmethod
    def is_matrix(self, group: Mapping[str, Any], shape: Shape) -> bool:
        """Return whether a tensor of a parameter group is stepped as a matrix."""

    @abstractmethod
    def update(self, group: Mapping[str, Any], state: State, grad: Tensor) -> Tensor | None:
        """Return the update of a weight: its decrease at a learning rate of 1; None for no step.

        Args:
            group: Of the parameter.
            state: Of the tensor; empty at first.
            grad: A matrix of `is_matrix`, or any other tensor; in fp32 at least.
        """

    def set_partition(self, parameter: Tensor, partition: Partition) -> None:
        """Set the tensors of a flat parameter; before the first step."""
        self._partitions[parameter] = partition

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        Raises:
            ModelError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter)
        return loss

    def _step(self, group: Mapping[str, Any], parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise ModelError(
                "optimizer",
                type(self).__name__,
                "it steps dense gradients alone, and one is sparse",
                "Make the embedding without sparse=True",
            )
        partition = self._partitions.get(parameter)
        if partition is None:
            update = self.update(group, self.state[parameter], _wide(grad))
            _apply(group, parameter, update)
            return
        states = self.state[parameter].setdefault("tensors", {})
        cut = self._whole_gradients(group, partition, grad)
        for number, part in self._parts(group, partition):
            own = slice(part.start, part.start + part.count)
            whole = grad[own]
            if part.place is not None:
                whole = cut[part.place : part.place + math.prod(part.shape)]
            if part.is_matrix:
                # The last digits of matrix products depend on the memory's alignment: a copy has
                # the same alignment on all ranks, and as without ZeRO.
                whole = whole.clone().view(part.shape)
            update = self.update(group, states.setdefault(number, {}), _wide(whole))
            if update is not None:
                update = update.reshape(-1)
                if part.place is not None:
                    update = update[part.first : part.first + part.count]
            _apply(group, parameter[own], update)

    def _parts(self, group: Mapping[str, Any], partition: Partition) -> Iterator[tuple[int, _Part]]:
        return partition.parts(lambda shape: self.is_matrix(group, shape))

    def _whole_gradients(
        self, group: Mapping[str, Any], partition: Partition, grad: Tensor
    ) -> Tensor:
        """Return the concatenated gradients of all matrices that lie on several ranks."""
        count = partition.cut_elements(lambda shape: self.is_matrix(group, shape))
        whole = grad.new_zeros(count)
        if not count:
            return whole
        for _, part in self._parts(group, partition):
            if part.place is not None:
                place = part.place + part.first
                whole[place : place + part.count] = grad[part.start : part.start + part.count]
        dist.all_reduce(whole, group=partition.group)
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, bit for bit.

        Raises:
            CheckpointError: It is of other partitions or of tensors of other shapes.
        """
        super().load_state_dict(state_dict)
        saved = [n for group in state_dict["param_groups"] for n in group["params"]]
        current = [(group, p) for group in self.param_groups for p in group["params"]]
        for number, (group, parameter) in zip(saved, current, strict=True):
            if number not in state_dict["state"]:
                continue
            # torch has cast it to the parameter's type, which may have 16 bits.
            copy = partial(Tensor.to, device=parameter.device, copy=True)
            state = tree_map_only(Tensor, copy, state_dict["state"][number])
            self._check_state(group, parameter, state)
            self.state[parameter] = state

    def _check_state(self, group: Mapping[str, Any], parameter: Tensor, state: State) -> None:
        partition = self._partitions.get(parameter)
        if partition is None:
            fits = "tensors" not in state and _fits(state, parameter.shape)
        else:
            states = state.get("tensors", {})
            parts = dict(self._parts(group, partition))
            fits = states.keys() <= parts.keys() and all(
                _fits(states[n], part.shape if part.is_matrix else (part.count,))
                for n, part in parts.items()
                if n in states
            )
        if not fits:
            raise CheckpointError(
                "optimizer",
                type(self).__name__,
                "the state is of other tensors, or of other partitions of them",
                "Resume with the model, the parameter groups and the topology of the save",
            )


def adam_update(state: State, grad: Tensor, betas: Sequence[float], eps: float) -> Tensor:
    """Return Adam's update; ``step``, ``exp_avg`` and ``exp_avg_sq`` are kept in the state."""
    if "step" not in state:
        state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
    denominator = adam_denominator(state, grad, grad, betas, eps)
    return torch.div(state["exp_avg"], denominator, out=denominator)


def adam_denominator(
    state: State, grad: Tensor, rotated: Tensor, betas: Sequence[float], eps: float
) -> Tensor:
    """Advance Adam's state by a step; return the denominator of its ``exp_avg``.

    ``rotated`` is the gradient in the basis in which ``exp_avg_sq`` averages squares.
    """
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(rotated, rotated, value=1 - betas[1])
    denominator = (state["exp_avg_sq"] / (1 - betas[1] ** state["step"])).sqrt_().add_(eps)
    return denominator.mul_(1 - betas[0] ** state["step"])


def check_betas(key: str, value: Any) -> None:
    """Check that a value is a pair of decays.

    Raises:
        ConfigError: It is not.
    """
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ConfigError(key, value, "it is no pair of numbers", "Give two") from None
    for beta in (first, second):
        check_number(ConfigError, key, beta, 0, 1)


def _apply(group: Mapping[str, Any], weight: Tensor, update: Tensor | None) -> None:
    if update is None:
        return
    wide = _wide(weight)
    wide.mul_(1 - group["lr"] * group["weight_decay"]).add_(
        update.view_as(wide), alpha=-group["lr"]
    )
    if wide is not weight:
        weight.copy_(wide)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _fits(state: State, shape: Sequence[int]) -> bool:
    tensors = (state[name] for name in ("exp_avg", "momentum_buffer") if name in state)
    return all(tuple(tensor.shape) == tuple(shape) for tensor in tensors)
