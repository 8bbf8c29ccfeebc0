# SPDX-License-Identifier: Apache-2.0
"""The interface to a network: messages between ranks, and the library's dense reduction.

All algorithms use messages between two ranks, so a missing rank can be named and any MPI or torch
backend works. Messages between two ranks arrive in order; both sides know their sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from wavemare.errors import CommError

GRACE_S = 2.0
"""Seconds in which the other ranks say whom they suspect, after one has failed."""
_LARGEST = 1 << 30
"""Bytes of the largest single message: MPI before version 4 counts with 32 bits."""


class Exchange(Protocol):
    """Pending messages. A zero-sized tensor is no message, on both sides."""

    def send(self, peer: int, tensor: Tensor) -> None:
        """Send a contiguous tensor, which must not change until `wait` returns."""

    def receive(self, peer: int, tensor: Tensor) -> None:
        """Fill a contiguous tensor with the next message of a peer."""

    def start(self) -> None:
        """Start the messages given so far, if the network starts them together."""

    def wait(self) -> None:
        """Wait for all sends and receives.

        The current stream waits, not the host, if the transport is `on_stream`.

        Raises:
            CommError: A peer was lost, or was silent for longer than the time limit.
        """


class Gathering(Protocol):
    """A pending `Transport.all_gather`."""

    def wait(self) -> None:
        """As `Exchange.wait`; the host waits too, if the result lies there."""


class Transport(ABC):
    """Messages and reductions within one group of ranks, used by one thread at a time.

    Attributes:
        name: ``mpi``, ``gloo``, ``nccl``, ...
        rank: This process's place in the group.
        size: Number of ranks.
        host: Name of the machine on which this rank runs.
        world_ranks: The launcher's number of each rank of the group.
        timeout_s: Seconds after which a silent peer counts as lost.
        takes_device: Whether messages may lie in an accelerator's memory.
        on_stream: Whether the device's current stream waits for messages, not the host.
        gathers_side_by_side: Whether a second `begin_gather` may follow before the first has ended,
            and harms nobody if it is never waited for, because another rank did not begin it.
        bytes_up: Bytes sent to other ranks so far.
        bytes_down: Bytes received from other ranks so far.
    """

    name: str
    rank: int
    size: int
    host: str
    world_ranks: Sequence[int]
    timeout_s: float
    takes_device: bool = False
    on_stream: bool = False
    gathers_side_by_side: bool = False
    bytes_up: int = 0
    bytes_down: int = 0

    @abstractmethod
    def begin(self) -> Exchange:
        """Start an exchange of messages."""

    @abstractmethod
    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` supports this type at full precision."""

    def all_reduce(self, flat: Tensor) -> None:
        """Sum a tensor over all ranks in place, in the library's order.

        It counts as 2 (N-1)/N of its bytes in each direction, the minimum.

        Raises:
            CommError: As `Exchange.wait`.
        """
        self._all_reduce(flat)
        least = 2 * (self.size - 1) * flat.nbytes // self.size
        self.bytes_up += least
        self.bytes_down += least

    @abstractmethod
    def _all_reduce(self, flat: Tensor) -> None: ...

    def begin_all_reduce(self, flat: Tensor, end: Callable[[CommError | None], None]) -> bool:
        """Begin `all_reduce` on a thread of the library's own, if it has one.

        Another thread may use the transport meanwhile. All ranks call it in the same order. Its
        bytes are not counted.

        Args:
            flat: The tensor.
            end: Called on that thread, with the error if it has failed.

        Returns:
            Whether the library has such a thread.

        Raises:
            CommError: As `Exchange.wait`.
        """
        return False

    @abstractmethod
    def split(self, colour: int) -> Self:
        """Return a transport among the ranks of one colour, in rank order; collective."""

    @abstractmethod
    def close(self) -> None:
        """Free the library's resources."""

    def stages(self, tensor: Tensor) -> bool:
        """Whether a tensor travels in the chunks of `StagedTransport`."""
        return False

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """Gather equal tensors from all ranks.

        Args:
            mine: (n,), this rank's, on any device.
            out: (N, n), written: each rank's; on the host, or where messages may lie.
        """
        self.begin_gather(mine, out).wait()

    def begin_gather(self, mine: Tensor, out: Tensor) -> Gathering:
        """Begin `all_gather`."""
        out[self.rank].copy_(mine)
        return self.begin_all_gather(list(out))

    def all_gather_parts(self, parts: Sequence[Tensor]) -> None:
        """Gather parts of different sizes from all ranks; all ranks know the sizes.

        Args:
            parts: One per rank; this rank's is read, the others are written.
        """
        self.begin_all_gather(parts).wait()

    def begin_all_gather(self, parts: Sequence[Tensor]) -> Exchange:
        """Begin `all_gather_parts`."""
        return self.begin_messages(lambda peer: [parts[peer]], lambda _: [parts[self.rank]])

    def begin_messages(
        self,
        arriving: Callable[[int], Iterable[Tensor]],
        leaving: Callable[[int], Iterable[Tensor]],
    ) -> Exchange:
        """Start to receive tensors from each peer, and to send tensors to each.

        Args:
            arriving: Returns the tensors that a peer's messages fill.
            leaving: Returns the tensors that a peer gets.
        """
        exchange = self.begin()
        for peer in self.peers():
            for tensor in arriving(peer):
                exchange.receive(peer, tensor)
        for peer in self.peers():
            for tensor in leaving(peer):
                exchange.send(peer, tensor)
        exchange.start()
        return exchange

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's small tensor, (n,), to all ranks."""
        table = tensor.new_empty(self.size, tensor.numel())
        self.all_gather(tensor, table)
        tensor.copy_(table[0])

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        mine = torch.zeros(1, dtype=torch.uint8)
        self.all_gather(mine, mine.new_empty(self.size, 1))

    def peers(self) -> list[int]:
        """Return the other ranks from the next one on: each rank starts with a different peer."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def lost(self, suspects: Sequence[int], how: str, grace_s: float = GRACE_S) -> CommError:
        """Ask all ranks for whom they wait; return the error that names those that are lost.

        A rank that waits for a lost one is silent, too, or ends. So each rank that fails tells the
        others whom it suspects. Those who say nothing are lost, if somebody suspects them; others
        that say nothing may only be late.

        Args:
            suspects: Ranks of this group for whom this one has waited in vain; empty if unknown.
            how: The symptom, such as ``it has closed its connection``.
            grace_s: Seconds in which the other ranks answer.
        """
        answers = self._ask(suspects, grace_s)
        absent = [rank for rank in range(self.size) if rank not in answers]
        if absent:
            suspected = {rank for answer in answers.values() for rank in answer}
            peers = [rank for rank in absent if rank in suspected] or absent
        else:  # all ranks name the same ones
            peers = next((list(answers[rank]) for rank in sorted(answers) if answers[rank]), [])
        names = self.world_ranks
        return CommError(
            "rank" if len(peers) < 2 else "ranks",  # noqa: PLR2004
            ", ".join(str(names[peer]) for peer in peers) or "unknown",
            f"lost during a collective of {self.size} ranks over {self.name}, "
            f"noticed by rank {names[self.rank]}: {how}",
            "Look at the output of that rank; if it was only slow, raise the time limit, timeout_s "
            "(in a configuration wavemare.watchdog.timeout_s)",
        )

    def _ask(self, suspects: Sequence[int], grace_s: float) -> Mapping[int, Sequence[int]]:
        """Return whom the ranks suspect that have answered in time, this one among them.

        Where ranks cannot be asked, all are said to suspect the same.
        """
        return dict.fromkeys(range(self.size), suspects)


def as_bytes(tensor: Tensor) -> Any:
    """Return a contiguous host tensor as a numpy array of its bytes, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def message_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Split a contiguous tensor into views that fit into one message each."""
    if tensor.numel() == 0:
        return ()
    flat = tensor.detach().view(-1)
    most = _LARGEST // flat.element_size()
    return (flat,) if flat.numel() <= most else flat.split(most)
