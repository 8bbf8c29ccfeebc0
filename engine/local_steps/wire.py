# SPDX-License-Identifier: Apache-2.0
"""Means over replicas: messages of fixed size, summed in rank order, behind the computation.

A header of each rank comes first, so that replicas which are out of step learn it before any data
moves. Each rank owns a range of the numbers: it gets that range of all messages, sums it, and sends
the mean to all others, written as the messages are. So a rank sends less than two messages, however
many replicas there are, and all ranks have the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavemare.comm.collective_queue import CollectiveQueue, Handle, Statistics
from wavemare.comm.executors import CollectiveCall, Scratch, equal_cuts, reduce_and_gather
from wavemare.comm.transport import open_transport
from wavemare.engine.local_steps.codec import GROUP, Code
from wavemare.errors import CommError

_BLOCK = 256
START, WHOLE = -2, -3
"""In place of a fragment in a `Header`: the beginning of a run, and all fragments at once."""


class Header(NamedTuple):
    """What must be the same on all replicas.

    Args:
        step: Optimizer steps done.
        fragment: Number of the part of the weights.
        numel: Numbers in the message.
        bits: Of a number.
        digest: Of the common weights of the fragment, before the exchange.
    """

    step: int
    fragment: int
    numel: int
    bits: int
    digest: int = 0

    def __str__(self) -> str:
        whole = f"step {self.step}, fragment {self.fragment}, {self.numel} numbers of {self.bits}"
        return f"{whole} bits, common weights {self.digest & (1 << 64) - 1:016x}"


@dataclass(eq=False)
class Message:
    """A mean that may still be on its way.

    Args:
        header: What all replicas agree on.
        notes: A number of each replica, in rank order; empty before `wait`.
        mean: What `wait` returns, if it has come.
        handle: Waits for it otherwise.
    """

    header: Header
    notes: list[float] = field(default_factory=list)
    mean: Tensor | None = None
    handle: Handle | None = None

    def wait(self) -> Tensor:
        """Return the mean, (E,), float32.

        Raises:
            CommError: A replica was lost, or is out of step.
        """
        if self.mean is None:
            assert self.handle is not None
            self.mean, self.handle = self.handle.wait(), None
        assert self.mean is not None
        return self.mean


class ReplicaLink:
    """Exchanges between the ranks at one place of all replicas.

    Args:
        group: A torch process group of these ranks.
        timeout_s: Seconds after which a silent replica counts as lost.
        device: Where the numbers are.
    """

    def __init__(self, group: Any, *, timeout_s: float, device: torch.device) -> None:
        self._transport = open_transport(group, timeout_s=timeout_s, device=device)
        self._queue = CollectiveQueue("wavemare-replicas", in_turn=self._transport.on_stream)
        self._scratch = Scratch()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other replicas so far."""
        return self._transport.bytes_up

    def own_range(self, numel: int) -> slice:
        """Return of which numbers of a coded message this rank makes the mean."""
        return ranges_of(numel, self._transport.size)[self._transport.rank]

    def send(self, header: Header, values: Tensor, note: float = 0.0) -> Message:
        """Begin an exchange of exact numbers.

        Args:
            header: Of this message.
            values: (E,), float32, of which the mean is made in place.
            note: A number for all replicas.
        """
        return self._begin(header, note, partial(self._mean, values), values)

    def send_coded(
        self, header: Header, values: Tensor, residuals: tuple[Tensor, Tensor], note: float = 0.0
    ) -> Message:
        """Begin an exchange of coded numbers.

        Args:
            header: Of this message.
            values: (E,), float32.
            residuals: What former messages have left out of this rank's numbers, (E,), and of the
                means of `own_range`. The second one changes until the message has come.
            note: A number for all replicas.
        """
        if not header.numel:  # of a stage that trains nothing
            return self.send(header, values, note)
        code, (waiting, owed) = Code(header.bits), residuals
        parts = encode_ranges(code, values, waiting, self._transport.size)
        mean = partial(self._coded_mean, code, header.numel, parts, owed)
        return self._begin(header, note, mean, *parts, owed)

    def _begin(
        self, header: Header, note: float, mean: Callable[[], Tensor], *tensors: Tensor
    ) -> Message:
        message = Message(header)

        def agree(_: Statistics) -> Callable[[], Tensor]:
            self._agree(message, note)
            return mean

        message.handle = self._queue.submit(agree, tensors[0].device, tensors)
        return message

    def close(self) -> None:
        """Finish all exchanges and close the transport."""
        self._queue.close()
        self._transport.close()

    def _agree(self, message: Message, note: float) -> None:
        own, size = message.header, len(message.header)
        (packed,) = struct.unpack("<q", struct.pack("<d", note))
        table = torch.empty(self._transport.size, size + 1, dtype=torch.int64)
        self._transport.all_gather(torch.tensor([*own, packed]), table)
        for rank, (*numbers, last) in enumerate(table.tolist()):
            other = Header(*numbers)
            if other != own:
                name = self._transport.world_ranks[rank]
                what = "message" if other[:-1] != own[:-1] else "copy of the common weights"
                reason = f"the {what} of rank {name} differs: {other}"
                remedy = "Give all ranks the same configuration, model and steps"
                raise CommError("wavemare.local_steps", str(own), reason, remedy)
            message.notes += struct.unpack("<d", struct.pack("<q", last))

    @property
    def _changes(self) -> int:
        """How many ranks' numbers the mean is of."""
        return self._transport.size

    def _mean(self, values: Tensor) -> Tensor:
        if values.numel():
            scale = 1.0 / self._changes
            reduce_and_gather(CollectiveCall(values, _BLOCK, scale, self._transport, self._scratch))
        return values

    def _coded_mean(self, code: Code, numel: int, parts: Sequence[Tensor], owed: Tensor) -> Tensor:
        transport, rank = self._transport, self._transport.rank
        received = [torch.empty_like(parts[rank]) for _ in parts]
        received[rank] = parts[rank]
        transport.begin_messages(lambda peer: [received[peer]], lambda peer: [parts[peer]]).wait()
        means = [torch.empty_like(part) for part in parts]
        means[rank] = encode_mean(code, received, owed)
        transport.all_gather_parts(means)
        return decode_ranges(code, means, numel)


def ranges_of(numel: int, count: int) -> list[slice]:
    """Return the range of each owner: whole groups of a code."""
    return [slice(*pair) for pair in pairwise(equal_cuts(numel, GROUP, count).tolist())]


def encode_ranges(code: Code, values: Tensor, residual: Tensor, count: int) -> list[Tensor]:
    """Return the message for each of some owners.

    Args:
        code: How numbers are written.
        values: (E,), float32.
        residual: (E,), what former messages have left out; then what these leave out.
        count: Owners.
    """
    ranges = ranges_of(values.numel(), count)
    return [code.encode_with(values[own], residual[own]) for own in ranges]


def encode_mean(code: Code, messages: Sequence[Tensor], residual: Tensor) -> Tensor:
    """Return the mean of all replicas' messages to an owner, as a message.

    Args:
        code: How numbers are written.
        messages: In rank order.
        residual: (E,), what former means have left out; then what this one leaves out.
    """
    total = torch.zeros_like(residual)
    for message in messages:
        total += code.decode(message, total.numel())
    return code.encode_with(total.mul_(1.0 / len(messages)), residual)


def decode_ranges(code: Code, messages: Sequence[Tensor], numel: int) -> Tensor:
    """Return the (numel,) numbers of the messages of all owners."""
    ranges = ranges_of(numel, len(messages))
    pairs = zip(messages, ranges, strict=True)
    return torch.cat([code.decode(message, own.stop - own.start) for message, own in pairs])
