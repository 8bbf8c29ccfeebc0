# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of one stage: how they are read, and what is held of one on its way."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wavemare.engine.same_batches import UNKNOWN, Marks
from wavemare.errors import DataError

Tensors = Tensor | tuple[Tensor, ...]


class DataEndedError(Exception):
    """The data had ended before a step or an evaluation, on all ranks of the pipeline."""


class Batch(NamedTuple):
    """A micro-batch as a stage reads it.

    Args:
        inputs: Nested tensors, on the rank's device.
        labels: Likewise.
        given: Both as the iterator gave them, which may be on the host.
    """

    inputs: Any
    labels: Any
    given: tuple[Any, Any]


@dataclass
class MicroBatch:
    """What a stage holds of a micro-batch between its forward and its backward pass.

    Args:
        inputs: What the first layer gets; leaves.
        ended: Whether this is only the notice that the data has ended.
        batch: As it was read, on the first stage: it may have to be given back.
        labels: On the last stage.
        outputs: For the next stage.
        loss: On the last stage; scalar.
        grads: Of the outputs, from the next stage.
        version: Of the weights that the forward pass used.
        marks: Of the batch, as the first stage read it.
    """

    inputs: Tensors = ()
    ended: bool = False
    batch: Any = None
    labels: Any = None
    outputs: Tensors = ()
    loss: Any = None
    grads: list[Tensor] = field(default_factory=list)
    version: int = 0
    marks: Marks = UNKNOWN

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
    """Reads the micro-batches of a run, in the order in which the caller's iterators give them.

    The first stage has one for the inputs, the last stage one for the labels. The first stage of an
    asynchronous pipeline reads ahead of its step. The last one then reads as far (`prefetch`), so
    that both iterators are at the same place whenever anybody else reads from them between steps.

    Args:
        read: Reads and prepares the next batch of an iterator; raises StopIteration at its end.
    """

    def __init__(self, read: Callable[[Iterator[Any]], Any]) -> None:
        self._read = read
        self._iterator: Iterator[Any] | None = None
        self._ended: Iterator[Any] | None = None
        self._waiting: deque[Any] = deque()

    @property
    def goes_on(self) -> bool:
        """Whether there is an iterator that has not ended."""
        return self._iterator is not None and self._iterator is not self._ended

    def use(self, iterator: Iterator[Any] | None) -> None:
        """Read from an iterator from now on, after what is waiting; None changes nothing."""
        if iterator is not None and iterator is not self._iterator:
            self._iterator = iterator
            self._ended = None

    def serves(self, iterator: Any) -> bool:
        """Whether this is the iterator that training reads from."""
        return iterator is not None and iterator is self._iterator

    def next(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: The data has ended.
            DataError: There has been no iterator.
        """
        if self._waiting:
            return self._waiting.popleft()
        if self._iterator is None:
            reason = "there is no iterator, and initialize had no training_data"
            raise DataError("data_iter", None, reason, "Give train_batch an iterator")
        try:
            return self._read(self._iterator)
        except StopIteration:
            self._ended = self._iterator
            raise

    def prefetch(self, count: int) -> None:
        """Read until so many batches are waiting, or the data ends."""
        while len(self._waiting) < count and self.goes_on:
            assert self._iterator is not None
            try:
                self._waiting.append(self._read(self._iterator))
            except StopIteration:
                self._ended = self._iterator

    def put_back(self, batches: Sequence[Any]) -> None:
        """Give batches back, in their order, to be the next ones."""
        self._waiting.extendleft(reversed(batches))

    def drop_waiting(self) -> None:
        """Forget what was read ahead or given back."""
        self._waiting.clear()
