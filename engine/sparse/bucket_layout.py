# SPDX-License-Identifier: Apache-2.0
"""Layout of a model's parameters in buckets.

Embeddings get their own buckets: most rows of their gradients are zero, and a dense layer in the
same blocks would hide that. Each parameter starts at a block boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Bucket", "Member", "Slot", "embedding_weights", "make_buckets", "row_tables"]


@dataclass(frozen=True)
class Member:
    """A parameter whose gradient is reduced.

    Args:
        name: In the model; the same on all ranks.
        numel: Elements.
        dtype: Type of its gradient on the wire.
        embedding: Whether it is the weight of an embedding.
    """

    name: str
    numel: int
    dtype: torch.dtype
    embedding: bool = False


@dataclass(frozen=True)
class Slot:
    """A parameter's range in its bucket.

    Args:
        name: Of the parameter.
        start: First element.
        stop: Element after the last.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that one collective reduces.

    Args:
        key: Name, from the names of its parameters; residuals are kept under it.
        dtype: Of its elements.
        numel: Elements, including the padding between parameters.
        slots: Its parameters.
    """

    key: str
    dtype: torch.dtype
    numel: int
    slots: tuple[Slot, ...]


def make_buckets(members: Sequence[Member], block: int, bucket_bytes: int) -> list[Bucket]:
    """Lay parameters out in buckets; depends on the model alone, so all ranks agree.

    Args:
        members: In registration order. Backward passes reach the last one first, so buckets are
            filled from the end.
        block: Elements per block.
        bucket_bytes: Largest bucket; a larger parameter is a bucket by itself.

    Returns:
        The buckets, in the expected order of their completion in backward passes.
    """
    closed: list[tuple[int, Bucket]] = []
    open_: dict[tuple[torch.dtype, bool], list[tuple[int, Member]]] = {}
    for time, member in enumerate(reversed(members)):
        kind = member.dtype, member.embedding
        group = open_.setdefault(kind, [])
        held = sum(_padded(other.numel, block) for _, other in group)
        if group and (held + member.numel) * member.dtype.itemsize > bucket_bytes:
            closed.append((group[-1][0], _bucket(group, block)))
            group = open_[kind] = []
        group.append((time, member))
    closed += [(group[-1][0], _bucket(group, block)) for group in open_.values()]
    return [bucket for _, bucket in sorted(closed, key=lambda item: item[0])]


def _bucket(group: Sequence[tuple[int, Member]], block: int) -> Bucket:
    slots, start = [], 0
    for _, member in group:
        slots.append(Slot(member.name, start, start + member.numel))
        start += _padded(member.numel, block)
    first, last = slots[0], slots[-1]
    key = first.name if len(slots) == 1 else f"{first.name} to {last.name}"
    return Bucket(key, group[0][1].dtype, last.stop, tuple(slots))


def _padded(numel: int, block: int) -> int:
    return -(-numel // block) * block


def embedding_weights(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of all embeddings' weights, whatever else they are tied to."""
    return {id(module.weight) for module in _embeddings(modules)}


def row_tables(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of the weights whose gradients are torch's sparse tensors."""
    return {id(module.weight) for module in _embeddings(modules) if module.sparse}


def _embeddings(modules: Iterable[nn.Module]) -> list[nn.Embedding | nn.EmbeddingBag]:
    return [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
