# SPDX-License-Identifier: Apache-2.0
"""A network whose messages are each followed by their checksum."""

from __future__ import annotations

import torch
from torch import Tensor

from wavemare.comm.checksums import changed, checksum_of
from wavemare.comm.transport.base import Exchange
from wavemare.comm.transport.wrapped import WrappedTransport

__all__ = ["ChecksummedTransport"]

_CONTENTS = "part of a collective"


class ChecksummedTransport(WrappedTransport):
    """Sends a message's CRC-32 and length behind it, and compares them when it has come.

    All ranks of a group must use it, or none. It has no reduction of the library's own, whose
    messages nobody else sees: `reduces` is always false. Checksums do not count as bytes sent.

    Args:
        inner: Moves the messages.
    """

    @property
    def message_device(self) -> torch.device:
        """Where small messages must lie."""
        return self._inner.message_device

    def begin(self) -> _ChecksummedExchange:
        """Begin messages that are under way together."""
        return _ChecksummedExchange(self, self._inner.begin())

    def receive_any(self, tensor: Tensor) -> int:
        """Fill a tensor with the next message of whichever peer.

        Raises:
            MessageError: It is not as it was sent.
        """
        peer = self._inner.receive_any(tensor)
        trailer = self.trailer()
        exchange = self._inner.begin()
        exchange.receive(peer, trailer)
        exchange.wait()
        self.check(peer, tensor, trailer)
        return peer

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` may be used instead of messages."""
        return False

    def _all_reduce(self, flat: Tensor) -> None:
        self._inner._all_reduce(flat)

    def split(self, colour: int) -> ChecksummedTransport:
        """Return a transport among the ranks of one colour; all ranks must call it."""
        return ChecksummedTransport(self._inner.split(colour))

    def trailer(self, tensor: Tensor | None = None) -> Tensor:
        """Return what follows a message, (2,) int64: checksum and bytes; without one, room."""
        numbers = (0, 0) if tensor is None else (checksum_of(tensor), tensor.nbytes)
        return torch.tensor(numbers, dtype=torch.int64, device=self.message_device)

    def check(self, peer: int, tensor: Tensor, trailer: Tensor) -> None:
        """Compare what has come with what followed it.

        Args:
            peer: The sender.
            tensor: The message, which may be shorter than the tensor.
            trailer: From its sender.

        Raises:
            MessageError: They differ.
        """
        told, length = trailer.tolist()
        contents = tensor.detach().view(-1).view(torch.uint8)
        if not 0 < length <= tensor.nbytes or checksum_of(contents[:length]) != told:
            ranks = self.world_ranks
            raise changed(ranks[peer], ranks[self.rank], _CONTENTS, tensor.nbytes)


class _ChecksummedExchange:
    def __init__(self, transport: ChecksummedTransport, inner: Exchange) -> None:
        self._transport = transport
        self._inner = inner
        self._sent: list[Tensor] = []
        self._arriving: list[tuple[int, Tensor, Tensor]] = []

    def send(self, peer: int, tensor: Tensor) -> None:
        trailer = self._transport.trailer(tensor) if tensor.numel() else None
        self._inner.send(peer, tensor)
        if trailer is not None:
            self._inner.send(peer, trailer)
            self._sent.append(trailer)
            self._transport.bytes_up += tensor.nbytes

    def receive(self, peer: int, tensor: Tensor) -> None:
        self._inner.receive(peer, tensor)
        if tensor.numel():
            trailer = self._transport.trailer()
            self._inner.receive(peer, trailer)
            self._arriving.append((peer, tensor, trailer))
            self._transport.bytes_down += tensor.nbytes

    def wait(self) -> None:
        self._inner.wait()
        self._sent.clear()
        arrived, self._arriving = self._arriving, []
        for peer, tensor, trailer in arrived:
            self._transport.check(peer, tensor, trailer)
