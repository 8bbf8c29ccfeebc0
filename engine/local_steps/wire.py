# SPDX-License-Identifier: Apache-2.0
"""Means over replicas: messages of fixed size, summed in rank order, behind the computation.

A header of each rank comes first, so that replicas which are out of step learn it before any data
moves. 32 bits are reduced and gathered in ranges. Fewer bits are gathered as they are, and each
rank sums them: the same bits everywhere.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wavemare.comm.collective_queue import CollectiveQueue, Handle
from wavemare.comm.executors import CollectiveCall, Scratch
from wavemare.comm.executors.ranges import reduce_and_gather
from wavemare.comm.statistics import Statistics
from wavemare.comm.transport import open_transport
from wavemare.errors import CommError

GROUP = 128
"""Numbers of a message that share a scale."""
_BLOCK = 256
_SCALE_BYTES = 4
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

    def send(self, header: Header, values: Tensor, note: float = 0.0) -> Message:
        """Begin an exchange.

        Args:
            header: Of this message.
            values: (E,), float32, of which the mean is made in place; or what `encode` returned.
            note: A number for all replicas.
        """
        message = Message(header)

        def work(_: Statistics) -> Tensor:
            self._agree(message, note)
            return self._mean(header, values)

        message.handle = self._queue.submit(work, values.device, (values,))
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

    def _mean(self, header: Header, values: Tensor) -> Tensor:
        transport = self._transport
        scale = 1.0 / transport.size
        if not header.numel:
            return values
        if values.dtype == torch.float32:
            reduce_and_gather(CollectiveCall(values, _BLOCK, scale, transport, self._scratch))
            return values
        table = values.new_empty(transport.size, values.numel())
        transport.all_gather(values, table)
        total = torch.zeros(header.numel, device=values.device)
        for row in table:
            total += decode(row, header.numel, header.bits)
        return total.mul_(scale)


def encode(values: Tensor, bits: int) -> Tensor:
    """Round numbers to integers of 8 or 4 bits, with one scale for each `GROUP`.

    Args:
        values: (E,), float32.
        bits: 8 or 4.

    Returns:
        (M,), uint8, of a size that E alone determines. Numbers that are not finite stay so.
    """
    top = 2 ** (bits - 1) - 1
    rows = functional.pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
    scales = rows.abs().amax(1) / top
    tiny = torch.finfo(torch.float32).tiny
    codes = (rows / scales.clamp_min(tiny)[:, None]).round_().clamp_(-top, top).nan_to_num_()
    codes = codes.add_(top).to(torch.uint8).view(-1)
    if bits == 4:  # noqa: PLR2004
        codes = codes[::2] | codes[1::2] << 4
    return torch.cat([scales.view(torch.uint8), codes])


def decode(message: Tensor, numel: int, bits: int) -> Tensor:
    """Return the numbers of an `encode`: (numel,), float32."""
    cut = _SCALE_BYTES * (-(-numel // GROUP))
    scales, codes = message[:cut].clone().view(torch.float32), message[cut:]
    if bits == 4:  # noqa: PLR2004
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)
    rows = codes.view(-1, GROUP).to(torch.float32).sub_(2 ** (bits - 1) - 1)
    return rows.mul_(scales[:, None]).view(-1)[:numel]
