# SPDX-License-Identifier: Apache-2.0
"""A model as a row of segments, and their profile: saved bytes and shared weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavemare.errors import ModelError

Activations = tuple[Tensor, ...]
"""Tensors between segments: floating-point ones, with gradients, and others (masks, positions) that
are passed on unchanged."""


@dataclass(frozen=True)
class Segment:
    """A part of a model that is differentiated by itself.

    Args:
        name: For messages and timelines.
        run: From its input activations to its output. Of other segments' results it may use only
            its input.
        sums_output: The first output tensor is this rank's part of a sum over `Segments.group`; the
            executor sums it before the next segment runs.
        sums_gradient: The same for the gradient of the first input tensor.
    """

    name: str
    run: Callable[[Activations], Activations]
    sums_output: bool = False
    sums_gradient: bool = False


@dataclass(frozen=True)
class Segments:
    """A model from a batch to its loss, or one stage of a pipeline.

    Args:
        split: From a batch to the first activations and the labels.
        body: All segments but the head, in order.
        head: From the body's output and the labels to the mean loss, scalar; None if the next stage
            takes the output and returns its gradient.
        head_sums_gradient: As `Segment.sums_gradient`, of the head.
        continues: Whether the first activations come from a stage that needs their gradient.
        group: Ranks over which the segments' collectives sum; None where there are none.
    """

    split: Callable[[Any], tuple[Activations, Any]]
    body: tuple[Segment, ...]
    head: Callable[[Activations, Any], Tensor] | None
    head_sums_gradient: bool = False
    continues: bool = False
    group: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all segments, the head's last."""
        head = () if self.head is None else ("head",)
        return (*(segment.name for segment in self.body), *head)

    @property
    def sums_output(self) -> tuple[bool, ...]:
        """Of each segment, the head's last."""
        head = () if self.head is None else (False,)
        return (*(segment.sums_output for segment in self.body), *head)

    @property
    def sums_gradient(self) -> tuple[bool, ...]:
        """Of each segment, the head's last."""
        head = () if self.head is None else (self.head_sums_gradient,)
        return (*(segment.sums_gradient for segment in self.body), *head)


@dataclass(frozen=True)
class SegmentProfile:
    """Results of a forward pass over all segments.

    Args:
        saved_bytes: For each segment, the head last, the bytes that it saves for its backward
            pass, without weights. A tensor that several segments save counts for the first one.
        aliased: For each segment the weights that earlier segments also use.
        owned: For each segment the weights that later segments also use, and no earlier one.
    """

    saved_bytes: tuple[int, ...]
    aliased: tuple[tuple[nn.Parameter, ...], ...]
    owned: tuple[tuple[nn.Parameter, ...], ...]


def no_shared_parameters(segments: Segments) -> SegmentProfile:
    """Return the profile of segments that share no weights; its bytes are 0."""
    count = len(segments.names)
    return SegmentProfile((0,) * count, ((),) * count, ((),) * count)


class SavedBytes:
    """Counts the memory that autograd saves: each storage once, weights not at all.

    Args:
        module: Owns the weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        self._seen: set[int] = set()
        self._kept: list[Tensor] = []  # so that no storage is freed and its address used again
        self.total = 0

    def hooks(self) -> Any:
        """Return the context that counts saved tensors."""
        return torch.autograd.graph.saved_tensors_hooks(self._count, lambda kept: kept)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._kept.append(tensor.detach())
            self.total += storage.nbytes()
        return tensor.detach()  # an operator's own output would hold the operator, which holds this


def cut(activations: Activations) -> Activations:
    """Return leaves of the same memory that require gradients; integer tensors stay."""
    return tuple(
        tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
        for tensor in activations
    )


def detached(activations: Activations) -> Activations:
    """Return the same memory without a graph."""
    return tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in activations)


def profile_segments(segments: Segments, module: nn.Module, batch: Any) -> SegmentProfile:
    """Run a batch forward; random state, buffers and gradients do not change.

    Args:
        segments: The model.
        module: Owns its weights and buffers.
        batch: On the module's device.

    Raises:
        ModelError: A segment uses a tensor of another one that its activations do not hold.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    activations, labels = segments.split(batch)
    devices = [activations[0].device] if activations[0].is_cuda else []
    counter = SavedBytes(module)
    saved: list[int] = []
    users: dict[nn.Parameter, list[int]] = {}
    origins: dict[Tensor, int] = {}
    graphs: list[Activations] = []
    with torch.random.fork_rng(devices), torch.enable_grad():
        for index, name in enumerate(segments.names):
            inputs = cut(activations)
            before = counter.total
            with counter.hooks():
                if index < len(segments.body):
                    outputs = segments.body[index].run(inputs)
                else:
                    assert segments.head is not None
                    outputs = (segments.head(inputs, labels),)
            saved.append(counter.total - before)
            _look(index, name, inputs, outputs, segments.names, origins, users)
            origins |= {tensor: index for tensor in inputs if tensor.requires_grad}
            graphs.append(outputs)
            activations = detached(outputs)
            if index < len(segments.body) and segments.body[index].sums_output:
                dist.all_reduce(activations[0], group=segments.group)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return SegmentProfile(tuple(saved), *_shared(users, len(segments.names)))


def _look(
    index: int,
    name: str,
    inputs: Activations,
    outputs: Activations,
    names: Sequence[str],
    origins: dict[Tensor, int],
    users: dict[nn.Parameter, list[int]],
) -> None:
    """Record the weights that a segment uses, and refuse a tensor of another segment."""
    own = {id(tensor) for tensor in inputs}
    foreign = {id(tensor): origin for tensor, origin in origins.items()}
    for leaf in _leaves(outputs):
        if id(leaf) in own:
            continue
        if id(leaf) in foreign:
            source = names[foreign[id(leaf)]]
            raise ModelError(
                f"segment {name}",
                tuple(leaf.shape),
                f"it uses a tensor that segment {source} has computed and that is not handed on "
                "to it, so its gradient would be lost",
                f"Hand it on in the activations, or keep {source} and {name} in one segment",
            )
        if isinstance(leaf, nn.Parameter):
            users.setdefault(leaf, []).append(index)


def _leaves(outputs: Activations) -> Iterator[Tensor]:
    """Yield the leaves of a graph, each once."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _shared(
    users: dict[nn.Parameter, list[int]], count: int
) -> tuple[tuple[tuple[nn.Parameter, ...], ...], tuple[tuple[nn.Parameter, ...], ...]]:
    """Return for each segment its aliased and its owned weights."""
    shared = {weight: sorted(where) for weight, where in users.items() if len(where) > 1}
    aliased = tuple(
        tuple(weight for weight, where in shared.items() if index in where[1:])
        for index in range(count)
    )
    owned = tuple(
        tuple(weight for weight, where in shared.items() if index == where[0])
        for index in range(count)
    )
    return aliased, owned
