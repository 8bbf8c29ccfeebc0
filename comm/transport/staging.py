# SPDX-License-Identifier: Apache-2.0
"""Copies an accelerator's tensors through the host, for networks that only read host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wavemare.comm.transport.base import Exchange, Gathering, Transport
from wavemare.errors import CommError

_CHUNK_BYTES = 4 << 20
"""Copying a chunk overlaps with sending the previous one."""


class StagedTransport(Transport):
    """Copies device tensors through pinned host memory in chunks; host tensors pass through.

    Only packed blocks are copied, as the link to the host is often slower than the network. Torch
    reuses pinned memory after the copies that read or write it.

    Args:
        inner: Sends host tensors. If it takes messages in device memory, only `all_reduce` is
            staged: few MPIs reduce there.
        stages_host: Whether to stage host tensors too; for tests.
    """

    def __init__(self, inner: Transport, *, stages_host: bool = False) -> None:
        self._inner = inner
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self.host = inner.host
        self.world_ranks = inner.world_ranks
        self.timeout_s = inner.timeout_s
        self._stages_host = stages_host
        self._copies: dict[torch.device, Any] = {}
        # Networks may still read and write the memory of messages of failed exchanges.
        self.failed: list[Any] = []
        self.takes_device = True

    def close(self) -> None:
        """Free the library's resources."""
        self._inner.close()

    def begin(self) -> _StagedExchange:
        """Start an exchange of messages."""
        return _StagedExchange(self, self._inner.begin())

    def begin_gather(self, mine: Tensor, out: Tensor) -> Gathering:
        """Begin `all_gather`."""
        if out.is_cuda:
            return super().begin_gather(mine, out)
        self.bytes_up += (self.size - 1) * mine.nbytes
        self.bytes_down += (self.size - 1) * mine.nbytes
        return self._inner.begin_gather(mine, out)

    def stages(self, tensor: Tensor) -> bool:
        """Whether a message is copied through the host."""
        return (tensor.is_cuda and not self._inner.takes_device) or self._stages_host

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` supports this type at full precision."""
        return self._inner.reduces(dtype)

    def _all_reduce(self, flat: Tensor) -> None:
        if not flat.is_cuda and not self._stages_host:
            self._inner._all_reduce(flat)
            return
        parts = [
            (target, staged, self.copy_out(target, staged)) for target, staged in _chunks(flat)
        ]
        for target, staged, copied in parts:
            if copied is not None:
                copied.synchronize()
            # The next chunks are copied meanwhile.
            self._inner._all_reduce(staged.view(flat.dtype))
            target.copy_(staged, non_blocking=True)

    def begin_all_reduce(self, flat: Tensor, end: Callable[[CommError | None], None]) -> bool:
        """Begin `all_reduce` on a thread of the library's own, if it has one."""
        staged = flat.is_cuda or self._stages_host
        return not staged and self._inner.begin_all_reduce(flat, end)

    def split(self, colour: int) -> StagedTransport:
        """Return a transport among the ranks of one colour; collective."""
        return StagedTransport(self._inner.split(colour), stages_host=self._stages_host)

    def copy_out(self, source: Tensor, staged: Tensor) -> Any:
        """Copy a device tensor to the host on a stream of its own.

        Returns:
            The event of the end; None if the source is on the host.
        """
        if not source.is_cuda:
            staged.copy_(source)
            return None
        device = source.device
        if device not in self._copies:
            self._copies[device] = torch.cuda.Stream(device)
        stream = self._copies[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            staged.copy_(source, non_blocking=True)
            return stream.record_event()


class _StagedExchange:
    """Sends chunks as they come to the host, while the next ones are copied."""

    def __init__(self, transport: StagedTransport, inner: Exchange) -> None:
        self._transport = transport
        self._inner = inner
        self._leaving: list[tuple[int, Tensor, Any]] = []
        self._arriving: list[tuple[Tensor, Tensor, Exchange]] = []

    def send(self, peer: int, tensor: Tensor) -> None:
        self._transport.bytes_up += tensor.nbytes
        if not self._transport.stages(tensor) or not tensor.numel():
            self._inner.send(peer, tensor)
            return
        for source, staged in _chunks(tensor):
            self._leaving.append((peer, staged, self._transport.copy_out(source, staged)))

    def receive(self, peer: int, tensor: Tensor) -> None:
        self._transport.bytes_down += tensor.nbytes
        if not self._transport.stages(tensor) or not tensor.numel():
            self._inner.receive(peer, tensor)
            return
        for target, staged in _chunks(tensor):
            arrival = self._transport._inner.begin()
            arrival.receive(peer, staged)
            self._arriving.append((target, staged, arrival))

    def start(self) -> None:
        leaving, self._leaving = self._leaving, []
        for peer, staged, copied in leaving:
            if copied is not None:
                copied.synchronize()
            self._inner.send(peer, staged)
        self._inner.start()

    def wait(self) -> None:
        arriving, self._arriving = self._arriving, []
        try:
            self.start()
            for target, staged, arrival in arriving:
                arrival.wait()
                # The next chunks arrive meanwhile.
                target.copy_(staged, non_blocking=True)
            self._inner.wait()
        except BaseException:
            self._transport.failed.append((self._inner, arriving))
            raise


def pinned(num_bytes: int) -> Tensor:
    """Return host memory that devices read and write without a copy by the host."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _chunks(tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the parts of a message with as much pinned memory each."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    staged = pinned(flat.numel())
    return list(zip(flat.split(_CHUNK_BYTES), staged.split(_CHUNK_BYTES), strict=True))
