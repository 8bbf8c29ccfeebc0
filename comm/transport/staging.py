# SPDX-License-Identifier: Apache-2.0
"""Sends an accelerator's tensors over networks that only read host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wavemare.comm.transport.base import Exchange, Transport

__all__ = ["StagedTransport"]

_CHUNK_BYTES = 4 << 20
"""Copying a chunk overlaps with sending the previous one."""


class StagedTransport(Transport):
    """Copies device tensors through pinned host memory in chunks; host tensors pass through.

    Only packed blocks are copied, as the link to the host is often slower than the network.

    Args:
        inner: Sends host tensors.
        stages_host: Whether to stage host tensors too; for tests.
    """

    def __init__(self, inner: Transport, *, stages_host: bool = False) -> None:
        self._inner = inner
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self.timeout_s = inner.timeout_s
        self._stages_host = stages_host
        self._free: list[Tensor] = []
        self._copies: dict[torch.device, Any] = {}
        self.takes_device = True

    @property
    def world_ranks(self) -> Sequence[int]:
        """The launcher's number of each rank of the group."""
        return self._inner.world_ranks

    @property
    def host(self) -> str:
        """Name of the machine on which this rank runs."""
        return self._inner.host

    def close(self) -> None:
        """Free the library's resources."""
        self._inner.close()

    def begin(self) -> _StagedExchange:
        """Start an exchange of messages."""
        return _StagedExchange(self, self._inner.begin())

    def stages(self, tensor: Tensor) -> bool:
        """Whether a tensor is copied through the host."""
        return tensor.is_cuda or self._stages_host

    def receive_any(self, tensor: Tensor) -> int:
        """Receive the next message of any peer."""
        if not self.stages(tensor):
            return self._inner.receive_any(tensor)
        held = self.take(tensor.nbytes)
        peer = self._inner.receive_any(held[: tensor.nbytes])
        tensor.view(-1).view(torch.uint8).copy_(held[: tensor.nbytes])
        self.give_back([held])
        return peer

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` supports this type at full precision."""
        return self._inner.reduces(dtype)

    def _all_reduce(self, flat: Tensor) -> None:
        if not self.stages(flat):
            self._inner._all_reduce(flat)
            return
        held = self.take(flat.nbytes)
        staged = held[: flat.nbytes].view(flat.dtype)
        staged.copy_(flat.view(-1))
        self._inner._all_reduce(staged)
        flat.view(-1).copy_(staged)
        self.give_back([held])

    def split(self, colour: int) -> StagedTransport:
        """Return a transport among the ranks of one colour; collective."""
        return StagedTransport(self._inner.split(colour), stages_host=self._stages_host)

    def take(self, num_bytes: int) -> Tensor:
        """Return pinned memory of at least ``num_bytes`` bytes; reused after `give_back`."""
        fitting = [held for held in self._free if held.numel() >= num_bytes]
        if fitting:
            smallest = min(fitting, key=Tensor.numel)
            self._free = [held for held in self._free if held is not smallest]
            return smallest
        # Powers of two: messages differ in size from step to step.
        size = 1 << max(num_bytes - 1, 1).bit_length()
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def give_back(self, held: Sequence[Tensor]) -> None:
        """Return memory of `take`."""
        self._free.extend(held)

    def copy_stream(self, device: torch.device) -> Any:
        """Return the stream for a device's copies."""
        if device not in self._copies:
            self._copies[device] = torch.cuda.Stream(device)
        return self._copies[device]


class _StagedExchange:
    def __init__(self, transport: StagedTransport, inner: Exchange) -> None:
        self._transport = transport
        self._inner = inner
        self._arriving: list[tuple[Tensor, Tensor]] = []
        self._held: list[Tensor] = []

    def send(self, peer: int, tensor: Tensor) -> None:
        self._transport.bytes_up += tensor.nbytes
        if not self._transport.stages(tensor) or not tensor.numel():
            self._inner.send(peer, tensor)
            return
        source = tensor.detach().view(-1).view(torch.uint8)
        staged = self._scratch(source)
        # Queue all copies; send each chunk when its copy has ended.
        chunks = list(zip(source.split(_CHUNK_BYTES), staged.split(_CHUNK_BYTES), strict=True))
        for ended, chunk in [(self._copy_out(*chunk), chunk[1]) for chunk in chunks]:
            if ended is not None:
                ended.synchronize()
            self._inner.send(peer, chunk)

    def receive(self, peer: int, tensor: Tensor) -> None:
        self._transport.bytes_down += tensor.nbytes
        if not self._transport.stages(tensor) or not tensor.numel():
            self._inner.receive(peer, tensor)
            return
        target = tensor.detach().view(-1).view(torch.uint8)
        staged = self._scratch(target)
        for chunk in staged.split(_CHUNK_BYTES):
            self._inner.receive(peer, chunk)
        self._arriving.append((target, staged))

    def wait(self) -> None:
        self._inner.wait()
        for target, staged in self._arriving:
            target.copy_(staged, non_blocking=True)
        devices = {target.device for target, _ in self._arriving if target.is_cuda}
        for device in devices:
            # Another exchange reuses the memory.
            torch.cuda.current_stream(device).synchronize()
        self._arriving.clear()
        self._transport.give_back(self._held)
        self._held.clear()

    def _scratch(self, like: Tensor) -> Tensor:
        held = self._transport.take(like.numel())
        self._held.append(held)
        return held[: like.numel()]

    def _copy_out(self, source: Tensor, staged: Tensor) -> Any:
        if not source.is_cuda:
            staged.copy_(source)
            return None
        stream = self._transport.copy_stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            staged.copy_(source, non_blocking=True)
            ended = torch.cuda.Event()
            ended.record()
        return ended
