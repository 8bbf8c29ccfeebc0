# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of one stage: how they are read, and what is held of one on its way."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.errors import DataError

Tensors = Tensor | tuple[Tensor, ...]


@dataclass
class MicroBatch:
    """What a stage holds of a micro-batch between its forward and its backward pass.

    Args:
        inputs: What the first layer gets; leaves.
        ended: Whether this is only the notice that the data has ended.
        source: Number of the iterator that it came from.
        batch: As it was read, on the first stage: it may have to be given back.
        labels: On the last stage.
        outputs: For the next stage.
        loss: On the last stage; scalar.
        grads: Of the outputs, from the next stage.
        version: Of the weights that the forward pass used.
    """

    inputs: Tensors = ()
    ended: bool = False
    source: int = 0
    batch: Any = None
    labels: Any = None
    outputs: Tensors = ()
    loss: Any = None
    grads: list[Tensor] = field(default_factory=list)
    version: int = 0

    @property
    def differentiable_outputs(self) -> list[Tensor]:
        """The outputs that the next stage sends gradients of."""
        return [t for t in as_tuple(self.outputs) if t.is_floating_point()]

    def backward(self) -> None:
        """Accumulate the weights' gradients, given those of the outputs."""
        pairs = zip(self.differentiable_outputs, self.grads, strict=True)
        used = [(output, grad) for output, grad in pairs if output.requires_grad]
        torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])

    def input_grads(self) -> list[Tensor]:
        """Return the gradients of the floating-point inputs, zero where none flowed."""
        floating = [t for t in as_tuple(self.inputs) if t.is_floating_point()]
        return [t.grad if t.grad is not None else torch.zeros_like(t) for t in floating]

    def free_graph(self) -> None:
        """Let the activations go; the inputs and their gradients stay."""
        self.outputs, self.loss, self.labels, self.grads = (), None, None, []


def as_tuple(tensors: Any) -> tuple[Tensor, ...]:
    """Return one tensor, or a tuple or list of them, as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def as_leaves(tensors: Any) -> Tensors:
    """Return one tensor, or a tuple of several, without their graph, to be differentiated."""
    leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in as_tuple(tensors))
    return leaves[0] if isinstance(tensors, Tensor) else leaves


def to_device(batch: Any, device: torch.device, *, detach: bool = False) -> Any:
    """Return a tensor, or nested mappings, tuples and lists of them, on a device.

    Args:
        batch: A mapping becomes a dictionary; values of other kinds stay as they are.
        device: Where the tensors go.
        detach: Whether they lose their graph.
    """
    if isinstance(batch, Tensor):
        return (batch.detach() if detach else batch).to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device, detach=detach) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [to_device(value, device, detach=detach) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


@contextmanager
def naming_ids(model: nn.Module) -> Iterator[None]:
    """Name the embedding, or the labels, where torch finds an index out of range in a pass.

    Raises:
        DataError: With the first id that has no row, or the label that has no output.
    """
    try:
        yield
    except IndexError as error:
        label = re.match(r"Target (-?\d+) is out of bounds", str(error))
        if label:
            remedy = "Give numbers from 0 on, as many as the model has, and -100 for no label"
            reason = "the model has no output of that number"
            raise DataError("label", int(label[1]), reason, remedy) from error
        for frame, _ in walk_tb(error.__traceback__):
            table, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
            if isinstance(table, nn.Embedding) and isinstance(ids, Tensor):
                rows = table.num_embeddings
                bad = int(ids[(ids < 0) | (ids >= rows)][0])
                name = next((n for n, module in model.named_modules() if module is table), "")
                reason = f"the model's {name} has {rows} rows, for ids from 0 to {rows - 1}"
                remedy = "Use the model's own tokenizer, and sequences no longer than the model"
                raise DataError("input id", bad, reason, remedy) from error
        raise


class Feed:
    """Reads the training iterators that a caller gives, one after the other.

    The first stage reads ahead: when the caller changes to another iterator, micro-batches of the
    one before are still on their way. Each is stamped with its iterator's number, so that the last
    stage takes its labels from the same one.

    Args:
        read: Reads and prepares the next batch of an iterator; raises StopIteration at its end.
        keeps_older: Whether older iterators are still read from: on the last stage.
    """

    def __init__(self, read: Callable[[Iterator[Any]], Any], *, keeps_older: bool = True) -> None:
        self._read = read
        self._keeps_older = keeps_older
        self._iterators: dict[int, Iterator[Any]] = {}
        self._put_back: deque[tuple[int, Any]] = deque()
        self._ended: int | None = None

    @property
    def newest(self) -> int:
        """Number of the iterator given last; 0 before the first."""
        return max(self._iterators, default=0)

    @property
    def goes_on(self) -> bool:
        """Whether an iterator has been given since one ended."""
        return self._ended is None or self._ended < self.newest

    def use(self, iterator: Iterator[Any] | None) -> None:
        """Read from an iterator from now on; the same one again, or none, changes nothing."""
        newest = self.newest
        if iterator is None or iterator is self._iterators.get(newest):
            return
        if not self._keeps_older:
            self._iterators.clear()
        self._iterators[newest + 1] = iterator

    def next_inputs(self) -> tuple[int, Any] | None:
        """Return the next batch and its iterator's number; None if the data ended.

        Raises:
            DataError: There has been no iterator.
        """
        if self._put_back:
            return self._put_back.popleft()
        number = self.newest
        if not number:
            reason = "there is no iterator, and initialize had no training_data"
            raise DataError("data_iter", None, reason, "Give train_batch an iterator")
        try:
            return number, self._read(self._iterators[number])
        except StopIteration:
            self._ended = number
            return None

    def next_labels(self, number: int) -> Any:
        """Return the next batch of an iterator; those before it are let go.

        Raises:
            DataError: The iterator has ended, or there has been none of this number.
        """
        for older in [n for n in self._iterators if n < number]:
            del self._iterators[older]
        if number in self._iterators:
            try:
                return self._read(self._iterators[number])
            except StopIteration:
                pass
        raise DataError(
            "data_iter",
            f"iterator {number}",
            "the last stage has fewer micro-batches than the first stage read",
            "Give the first and last stage iterators over the same data",
        )

    def drop_put_back(self) -> list[int]:
        """Forget what was given back; return the iterator's number of each batch."""
        dropped = [number for number, _ in self._put_back]
        self._put_back.clear()
        return dropped

    def skip(self, numbers: Iterable[int]) -> None:
        """Pass over a batch of each of these iterators, as the first stage has done."""
        for number in numbers:
            self.next_labels(number)

    def put_back(self, batches: list[tuple[int, Any]]) -> None:
        """Give batches back, in their order, to be the next ones."""
        self._put_back.extendleft(reversed(batches))
