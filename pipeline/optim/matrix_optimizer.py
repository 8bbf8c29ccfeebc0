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
FEEDBACK = "previous_update"
"""Of an optimizer's state: the update before, if it is corrected by the next one."""

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
            place, is_stepped = None, True
            # Each rank counts all cut matrices, so that all agree on their places.
            if is_matrix(shape) and self._is_cut(offset, count):
                place, cut = cut, cut + count
                is_stepped = self.begin == self._begin_of_most(offset, count)
            first = max(self.begin - offset, 0)
            last = min(self.begin + self.size - offset, count)
            if first < last:
                start = offset + first - self.begin
                part = _Part(shape, start, first, last - first, is_matrix(shape), place, is_stepped)
                yield number, part

    def cut_elements(self, is_matrix: Callable[[Shape], bool]) -> int:
        """Return how many elements the matrices have that lie on several ranks."""
        sizes = [(s, o, math.prod(s)) for s, o in zip(self.shapes, self.offsets, strict=True)]
        return sum(n for s, o, n in sizes if is_matrix(s) and self._is_cut(o, n))

    def _is_cut(self, offset: int, count: int) -> bool:
        return offset // self.size != (offset + count - 1) // self.size

    def _begin_of_most(self, offset: int, count: int) -> int:
        """Return where the partition begins that has most of a tensor, the first of equal ones."""
        end = offset + count
        begins = range(offset - offset % self.size, end, self.size)
        return max(begins, key=lambda b: min(b + self.size, end) - max(b, offset))


@dataclass(frozen=True)
class _Part:
    """The elements of a tensor in a partition."""

    shape: Shape  # of the tensor
    start: int  # index in the partition of the first element
    first: int  # index of that element in the tensor
    count: int
    is_matrix: bool  # whether it is stepped as a matrix, rather than element by element
    place: int | None  # of a matrix on several ranks, where it is assembled
    is_stepped: bool  # on this rank, rather than on another one that has more of the matrix


@dataclass(frozen=True, eq=False)
class Feedback:
    """How a step corrects the one before, see `UpdateFeedback`.

    Args:
        previous: The update before, as many elements as the weight; the step leaves its own there.
        extent: The correction is so many times the difference of the two updates.
    """

    previous: Tensor
    extent: float

    def of(self, own: slice) -> Feedback:
        """Return that of some elements of a flat weight."""
        return Feedback(self.previous[own], self.extent)


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor, or the elements of one, that this rank steps.

    Args:
        weight: What is stepped; of a matrix on several ranks, where its update is left.
        grad: As many elements, perhaps in another shape.
        shape: Of the tensor.
        state: Of the tensor; empty at first.
        is_matrix: Whether it is stepped as a matrix.
        mark: Of a matrix on several ranks, where is left whether it is stepped: ().
        feedback: What the step corrects of the one before; None for nothing.
    """

    weight: Tensor
    grad: Tensor
    shape: Shape
    state: State
    is_matrix: bool
    mark: Tensor | None = None
    feedback: Feedback | None = None

    def matrix(self) -> Tensor:
        """Return the gradient of a matrix, in its shape and in fp32 at least."""
        return _wide(self.grad).view(self.shape)


_STEPPED, _LOOKED = 1.0, 2.0  # marks of matrices on several ranks; 0 if nothing has begun


class MatrixOptimizer(Optimizer, ABC):
    """An optimizer whose update of a matrix depends on all of its elements.

    Other tensors are stepped element by element. Weight decay is decoupled: ``w -= lr * (decay * w
    + update)``. States, and the arithmetic of parameters in 16 bits, are fp32.

    ZeRO 1 and 2 give an optimizer flat partitions instead of a model's tensors. With
    `set_partition`, it steps the matrices in a partition as in the model. A matrix that lies on
    several ranks is stepped by the one that has most of it, which alone has its state. For each
    flat parameter with such matrices, one all-reduce assembles their gradients and one gives all
    ranks their updates. Both are exact, as each element comes from one rank. A step is therefore a
    collective of the data ranks.

    Attributes:
        has_only_looked: Whether the last step began with a tensor and did not step it.
        extent: Returns that of the next step's `Feedback`; None for no feedback.
    """

    has_only_looked = False
    extent: Callable[[], float] | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._partitions: dict[Tensor, Partition] = {}

    @abstractmethod
    def is_matrix(self, group: Mapping[str, Any], shape: Shape) -> bool:
        """Return whether a tensor of a parameter group is stepped as a matrix."""

    @abstractmethod
    def updates(
        self, group: Mapping[str, Any], pieces: Sequence[Piece]
    ) -> Iterator[tuple[Piece, Tensor | None]]:
        """Yield the update of each tensor of a parameter group, in any order.

        An update times `scale` is the weight's decrease at a learning rate of 1; None for no step.
        """

    def scale(self, group: Mapping[str, Any], shape: Shape) -> float:
        """Return what the update of a matrix of a parameter group is multiplied by."""
        return 1.0

    def set_partition(self, parameter: Tensor, partition: Partition) -> None:
        """Set the tensors of a flat parameter; before the first step."""
        self._partitions[parameter] = partition

    def partition_of(self, parameter: Tensor) -> Partition | None:
        """Return what `set_partition` was told of a parameter; None if it is a tensor itself."""
        return self._partitions.get(parameter)

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
        self.has_only_looked = False
        extent = None if self.extent is None else self.extent()
        for group in self.param_groups:
            self._step(group, extent)
        return loss

    def _step(self, group: Mapping[str, Any], extent: float | None) -> None:
        pieces: list[Piece] = []
        cut: list[tuple[Tensor, Partition, Tensor, Feedback | None]] = []
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise ModelError(
                    "optimizer",
                    type(self).__name__,
                    "it steps dense gradients alone, and one is sparse",
                    "Make the embedding without sparse=True",
                )
            partition = self._partitions.get(parameter)
            feedback = None if extent is None else self._feedback(parameter, extent)
            if partition is None:
                shape = tuple(grad.shape)
                state, is_matrix = self.state[parameter], self.is_matrix(group, shape)
                pieces.append(Piece(parameter, grad, shape, state, is_matrix, feedback=feedback))
                continue
            whole = self._whole_gradients(group, partition, grad)
            room = whole.new_zeros(len(partition.shapes) + len(whole)) if len(whole) else whole
            pieces += self._partition_pieces(group, parameter, partition, whole, room, feedback)
            if len(whole):
                cut.append((parameter, partition, room, feedback))
        for piece, update in self.updates(group, pieces):
            looked = update is None and bool(piece.state)
            self.has_only_looked |= looked
            if piece.mark is None:
                scale = self.scale(group, piece.shape) if piece.is_matrix else 1.0
                _apply(group, piece.weight, update, scale, piece.feedback)
            elif update is not None:
                piece.weight.copy_(update.reshape(-1))
                piece.mark.fill_(_STEPPED)
            elif looked:
                piece.mark.fill_(_LOOKED)
        for each in cut:
            self._step_cut(group, *each)

    def _feedback(self, parameter: Tensor, extent: float) -> Feedback:
        """Return what the step corrects of a parameter; the first one has none before it."""
        state = self.state[parameter]
        if FEEDBACK not in state:
            state[FEEDBACK], extent = torch.zeros_like(parameter), 0.0
        return Feedback(state[FEEDBACK], extent)

    def _parts(self, group: Mapping[str, Any], partition: Partition) -> Iterator[tuple[int, _Part]]:
        return partition.parts(lambda shape: self.is_matrix(group, shape))

    def _partition_pieces(
        self,
        group: Mapping[str, Any],
        parameter: Tensor,
        partition: Partition,
        whole: Tensor,
        room: Tensor,
        feedback: Feedback | None,
    ) -> Iterator[Piece]:
        """Yield what this rank steps of a flat parameter.

        Args:
            group: Of the parameter.
            parameter: Flat.
            partition: Of it.
            whole: Of `_whole_gradients`.
            room: For a mark of each tensor, then for the updates of these matrices.
            feedback: Of the flat parameter.
        """
        states = self.state[parameter].setdefault("tensors", {})
        grad, marks = parameter.grad, len(partition.shapes)
        assert grad is not None
        for number, part in self._parts(group, partition):
            if not part.is_stepped:
                continue
            state = states.setdefault(number, {})
            if part.place is None:
                own = slice(part.start, part.start + part.count)
                shape = part.shape if part.is_matrix else (part.count,)
                piece = parameter[own], grad[own], shape, state, part.is_matrix
                yield Piece(*piece, feedback=feedback and feedback.of(own))
            else:
                own = slice(part.place, part.place + math.prod(part.shape))
                target = room[marks:][own]
                yield Piece(target, whole[own], part.shape, state, True, room[number])

    def _step_cut(
        self,
        group: Mapping[str, Any],
        parameter: Tensor,
        partition: Partition,
        room: Tensor,
        feedback: Feedback | None,
    ) -> None:
        """Step this rank's elements of the matrices that lie on several ranks."""
        dist.all_reduce(room, group=partition.group)
        count = len(partition.shapes)
        marks, updates = room[:count].tolist(), room[count:]
        for number, part in self._parts(group, partition):
            if part.place is None:
                continue
            self.has_only_looked |= marks[number] == _LOOKED
            if marks[number] == _STEPPED:
                first = part.place + part.first
                own = slice(part.start, part.start + part.count)
                update, scale = updates[first : first + part.count], self.scale(group, part.shape)
                _apply(group, parameter[own], update, scale, feedback and feedback.of(own))

    def _whole_gradients(
        self, group: Mapping[str, Any], partition: Partition, grad: Tensor
    ) -> Tensor:
        """Return the concatenated gradients of all matrices that lie on several ranks."""
        count = partition.cut_elements(lambda shape: self.is_matrix(group, shape))
        whole = _wide(grad.new_zeros(count))
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


def adam_update(piece: Piece, betas: Sequence[float], eps: float) -> Tensor:
    """Return Adam's update; ``step``, ``exp_avg`` and ``exp_avg_sq`` are kept in the state."""
    state, grad = piece.state, _wide(piece.grad)
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


def _apply(
    group: Mapping[str, Any],
    weight: Tensor,
    update: Tensor | None,
    scale: float,
    feedback: Feedback | None,
) -> None:
    if update is None:
        return
    wide, update = _wide(weight), update.reshape(weight.shape)
    rate, decay = group["lr"] * scale, group["lr"] * group["weight_decay"]
    if feedback is not None and feedback.extent:
        # In one go over the memory, as it takes as long as all else that is no matrix product.
        step = torch.mul(wide, -decay).add_(update, alpha=-rate)
        wide.add_(step, alpha=1 + feedback.extent).sub_(feedback.previous, alpha=feedback.extent)
        feedback.previous.copy_(step)
    else:
        before = None if feedback is None else wide.clone()
        wide.mul_(1 - decay).add_(update, alpha=-rate)
        if feedback is not None and before is not None:
            torch.sub(wide, before, out=before)
            feedback.previous.copy_(before)
    if wide is not weight:
        weight.copy_(wide)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _fits(state: State, shape: Sequence[int]) -> bool:
    tensors = (state[name] for name in ("exp_avg", "momentum_buffer") if name in state)
    return all(tuple(tensor.shape) == tuple(shape) for tensor in tensors)
