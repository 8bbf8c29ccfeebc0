# SPDX-License-Identifier: Apache-2.0
"""A network that does something to the messages of another one."""

from __future__ import annotations

from collections.abc import Sequence

from wavemare.comm.transport.base import Transport

__all__ = ["WrappedTransport"]


class WrappedTransport(Transport):
    """Base of those: the same ranks, hosts and time limit.

    Args:
        inner: Moves the messages.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self.timeout_s = inner.timeout_s
        self.takes_device = inner.takes_device

    @property
    def world_ranks(self) -> Sequence[int]:
        """Of each rank of the group the number that its launcher gave it."""
        return self._inner.world_ranks

    @property
    def host(self) -> str:
        """Name of the machine on which this rank runs."""
        return self._inner.host

    def close(self) -> None:
        """Give back what the library holds."""
        self._inner.close()
