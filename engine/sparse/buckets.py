# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients: their layout, and their reduction in the background.

Embeddings get their own buckets: most rows of their gradients are zero, and a dense layer in the
same blocks would hide that. Each parameter starts at a block boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wavemare.comm.collective_queue import Handle
from wavemare.comm.gradient_rows import GradientRows, Slot
from wavemare.comm.masks import OwnedRange
from wavemare.comm.sparse import SparseComm

LARGEST_BUCKET = 64 << 20
"""Bytes; larger buckets are not faster."""
_BUCKETS = 4


@dataclass(frozen=True)
class Member:
    """A parameter whose gradient is reduced.

    Args:
        name: In the model; the same on all ranks.
        numel: Elements.
        dtype: Type of its gradient on the wire.
        embedding: Whether it is the weight of an embedding.
        experts: Whether it is of experts that data ranks share.
        columns: Of a table whose gradient is sparse; else 0.
    """

    name: str
    numel: int
    dtype: torch.dtype
    embedding: bool = False
    experts: bool = False
    columns: int = 0


@dataclass(frozen=True)
class Bucket:
    """Gradients that one collective reduces.

    Args:
        key: Name, from the names of its parameters; residuals are kept under it.
        dtype: Of its elements.
        numel: Elements, including the padding between parameters.
        slots: Its parameters.
        experts: Whether they are of experts that data ranks share.
        columns: Of the table, if it is one whose gradient is sparse: its rows travel; else 0.
    """

    key: str
    dtype: torch.dtype
    numel: int
    slots: tuple[Slot, ...]
    experts: bool = False
    columns: int = 0


def default_bucket_bytes(members: Sequence[Member]) -> int:
    """Return the size of buckets that leave evenly during a backward pass, from 2 to 64 MiB."""
    dense = sum(m.numel * m.dtype.itemsize for m in members if not m.embedding)
    return min(max(dense // _BUCKETS, 2 << 20), LARGEST_BUCKET)


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
    open_: dict[tuple[object, ...], list[tuple[int, Member]]] = {}
    for time, member in enumerate(reversed(members)):
        if member.columns:
            closed.append((time, _bucket([(time, member)], block)))
            continue
        kind = member.dtype, member.embedding, member.experts
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
    one = group[0][1]
    return Bucket(key, one.dtype, last.stop, tuple(slots), one.experts, one.columns)


def _padded(numel: int, block: int) -> int:
    return -(-numel // block) * block


def regrouped(
    values: Mapping[str, Tensor], before: Sequence[Bucket], after: Sequence[Bucket]
) -> dict[str, Tensor]:
    """Return what each parameter has in the buckets of one layout, in those of another.

    Args:
        values: By the bucket's key, (its numel,).
        before: The buckets of the values.
        after: Those of the result, in which other parameters have zeros.
    """
    own = {
        slot.name: values[bucket.key][slot.start : slot.stop]
        for bucket in before
        if bucket.key in values
        for slot in bucket.slots
    }
    found = {}
    for bucket in after:
        held = [slot for slot in bucket.slots if slot.name in own]
        if held:
            flat = own[held[0].name].new_zeros(bucket.numel)
            for slot in held:
                flat[slot.start : slot.stop] = own[slot.name]
            found[bucket.key] = flat
    return found


def embedding_weights(modules: Iterable[nn.Module], *, sparse: bool = False) -> set[int]:
    """Return the identities of embeddings' weights, whatever else they are tied to.

    Args:
        modules: Of the model.
        sparse: Whether only embeddings with ``sparse=True`` count.
    """
    tables = (m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {id(table.weight) for table in tables if table.sparse or not sparse}


class BucketReducer:
    """Reduces all buckets once in each round.

    Gradients come in any order. All ranks send the buckets in the same order: a complete bucket
    waits for the ones before it. Gradients that are missing at the end of a round count as zero.

    The first order is a guess. `arrange` replaces it by the order in which gradients have come.

    Args:
        comm: Reduces.
        buckets: In the order of sending.
        device: Where they are.
        write: Takes each reduced gradient before the round ends: name of the parameter, (numel,),
            valid during the call, or a coalesced sparse (rows, columns), and whether this rank gave
            a gradient of its own.
        ranges: Owned ranges by the bucket's key, for a reduce-scatter; an all-reduce if omitted.
        rows: Tells which blocks of embeddings are not zero.
        keep: Whether buckets stay in memory from round to round.
        expert_comm: Reduces the buckets of experts.
    """

    def __init__(
        self,
        comm: SparseComm,
        buckets: Sequence[Bucket],
        *,
        device: torch.device,
        write: Callable[[str, Tensor, bool], None],
        ranges: Mapping[str, Sequence[OwnedRange]] | None = None,
        rows: GradientRows | None = None,
        keep: bool = True,
        expert_comm: SparseComm | None = None,
    ) -> None:
        self._comm, self._expert_comm = comm, expert_comm or comm
        self._device = device
        self._write = write
        self._ranges = ranges
        self._rows = rows
        self._keep = keep
        self._slot_of = {slot.name: slot for bucket in buckets for slot in bucket.slots}
        self._buffers: dict[str, Tensor] = {}
        self._rows_given: dict[str, Tensor] = {}
        self._stand(buckets)
        self._begin()

    def _stand(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets in the order of sending."""
        self.buckets = tuple(buckets)
        self._number_of = {
            slot.name: number for number, bucket in enumerate(buckets) for slot in bucket.slots
        }

    def arrange(self, names: Sequence[str]) -> None:
        """Send buckets in the order in which they became complete on rank 0, from now on.

        A table behind the other layers then travels during most of the backward pass, wherever the
        model has registered it. Collective over all ranks, between two rounds.

        Args:
            names: Parameters in the order in which their gradients have come on this rank. A bucket
                of which one is missing comes last.

        Raises:
            CommError: A peer was lost, or makes another call.
        """
        assert not self.begun
        came = {name: time for time, name in enumerate(names)}
        times = [max(came.get(s.name, len(came)) for s in b.slots) for b in self.buckets]
        count = len(times)
        if count < 2:  # noqa: PLR2004
            return
        order = torch.tensor(times, device=self._device).argsort(stable=True).int()
        # All of it belongs to rank 0.
        self._comm.allgather_(order, [0, *[count] * self._comm.size])
        self._stand([self.buckets[number] for number in order.tolist()])
        self._begin()

    def _begin(self) -> None:
        self._missing = [{slot.name for slot in bucket.slots} for bucket in self.buckets]
        self._handles: list[Handle] = []
        self._num_written = 0
        self._came: dict[str, None] = {}

    @property
    def came(self) -> list[str]:
        """The parameters whose gradients have come in this round, in their order."""
        return list(self._came)

    @property
    def begun(self) -> bool:
        """Whether a gradient has come in this round."""
        return any(
            len(missing) < len(bucket.slots)
            for missing, bucket in zip(self._missing, self.buckets, strict=True)
        )

    @property
    def num_sent(self) -> int:
        """Number of buckets sent in this round."""
        return len(self._handles)

    def has(self, name: str) -> bool:
        """Whether the parameter's gradient has come."""
        return name not in self._missing[self._number_of[name]]

    def sent(self, name: str) -> bool:
        """Whether the parameter's bucket was sent in this round."""
        return self._number_of[name] < self.num_sent

    def put(self, name: str, gradient: Tensor, *, in_place: bool = False) -> None:
        """Copy a gradient into its bucket, replacing an earlier one.

        Args:
            name: Of its parameter.
            gradient: Of any shape and type; of a table with columns sparse or dense, and it must
                not change until it is written.
            in_place: Whether a gradient that fills its bucket may be reduced where it is; it must
                not change until it is written.
        """
        assert not self.sent(name), name
        number = self._number_of[name]
        bucket = self.buckets[number]
        like = (gradient.dtype, gradient.device) == (bucket.dtype, self._device)
        like = like and not gradient.requires_grad  # of a graph that somebody keeps
        if bucket.columns:
            self._rows_given[name] = gradient
        elif in_place and like and len(bucket.slots) == 1 and gradient.is_contiguous():
            self._buffers[bucket.key] = gradient.view(-1)
        else:
            self._view(number, self._slot_of[name]).view(gradient.shape).copy_(gradient)
        self._missing[number].discard(name)
        self._came.pop(name, None)
        self._came[name] = None

    def send_complete(self) -> None:
        """Send the complete buckets."""
        while (number := self.num_sent) < len(self.buckets) and not self._missing[number]:
            self._send()

    def take_reduced(self) -> None:
        """Write the buckets that have come back."""
        while self._num_written < self.num_sent and self._handles[self._num_written].done():
            self._take()

    def end(self) -> None:
        """Send the remaining buckets, and wait for all.

        Raises:
            CommError: A peer was lost, or reduces other buckets.
        """
        while self.num_sent < len(self.buckets):
            self._send()
        while self._num_written < self.num_sent:
            self._take()
        self._begin()

    def drop(self) -> None:
        """Forget the gradients of a round that did not end, once those that were sent are back."""
        for handle in self._handles[self._num_written :]:
            handle.wait()
        self._buffers.clear()
        self._rows_given.clear()
        self._begin()

    def _send(self) -> None:
        number = self.num_sent
        bucket = self.buckets[number]
        if bucket.columns:
            self._handles.append(self._send_rows(bucket))
            return
        flat = self._buffer(number)
        if self._missing[number]:  # then the buffer may be of an earlier round
            for slot in bucket.slots:
                if slot.name in self._missing[number]:
                    flat[slot.start : slot.stop].zero_()
        comm = self._expert_comm if bucket.experts else self._comm
        blocks = self._rows.take(bucket.slots, comm.block) if self._rows else None
        reduce: Callable[..., Handle] = comm.allreduce_
        arguments: tuple[object, ...] = (flat,)
        if self._ranges is not None:
            reduce, arguments = comm.reduce_scatter_, (flat, self._ranges[bucket.key])
        self._handles.append(reduce(*arguments, key=bucket.key, blocks=blocks, async_op=True))

    def _send_rows(self, bucket: Bucket) -> Handle:
        count = bucket.numel // bucket.columns
        gradient = self._rows_given.pop(bucket.slots[0].name, None)
        if gradient is None:
            ids = torch.empty(0, dtype=torch.int64, device=self._device)
            rows = torch.empty(0, bucket.columns, dtype=bucket.dtype, device=self._device)
        else:
            # Dense if another layer uses the same weight.
            gradient = gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
            ids = gradient._indices()[0].contiguous()
            rows = gradient._values().to(bucket.dtype).contiguous()
        return self._comm.allreduce_rows_(ids, rows, count, async_op=True)

    def _take_rows(self, bucket: Bucket, handle: Handle, here: bool) -> None:
        ids, rows = handle.wait()
        shape = bucket.numel // bucket.columns, bucket.columns
        reduced = torch.sparse_coo_tensor(
            ids[None], rows, shape, is_coalesced=True, check_invariants=False
        )
        self._write(bucket.slots[0].name, reduced, here)

    def _take(self) -> None:
        number = self._num_written
        bucket = self.buckets[number]
        if bucket.columns:
            self._take_rows(bucket, self._handles[number], not self._missing[number])
            self._num_written += 1
            return
        self._handles[number].wait()
        for slot in bucket.slots:
            here = slot.name not in self._missing[number]
            self._write(slot.name, self._view(number, slot), here)
        if not self._keep or len(bucket.slots) == 1:
            del self._buffers[bucket.key]
        self._num_written += 1

    def _view(self, number: int, slot: Slot) -> Tensor:
        return self._buffer(number)[slot.start : slot.stop]

    def _buffer(self, number: int) -> Tensor:
        bucket = self.buckets[number]
        if bucket.key not in self._buffers:
            self._buffers[bucket.key] = torch.zeros(
                bucket.numel, dtype=bucket.dtype, device=self._device
            )
        return self._buffers[bucket.key]
