# SPDX-License-Identifier: Apache-2.0
"""Collectives one after the other: agreed on by all ranks, run in the background, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from wavemare.comm.agreement import Header, agree, digest_of
from wavemare.comm.reduction import Reduction
from wavemare.comm.statistics import Statistics, Totals
from wavemare.comm.transport import Transport
from wavemare.comm.worker import CollectiveThread, Handle

__all__ = ["Calls"]


class Calls:
    """The calls of a `SparseComm`, in the order in which all its ranks make them.

    Args:
        transports: Those whose bytes are counted; the first is that among all ranks.
        reduction: Learns from the times of the calls before.
        block: Elements per block.
        terms: Digest of the settings that must be the same on all ranks (see `digest_of`).

    Attributes:
        totals: What the calls did.
    """

    def __init__(
        self, transports: Sequence[Transport], reduction: Reduction, block: int, terms: int
    ) -> None:
        self.totals = Totals()
        self._transports = transports
        self._reduction = reduction
        self._block = block
        self._terms = terms
        self._worker = CollectiveThread(f"wavemare-collectives-{transports[0].rank}")
        self._count = 0

    def submit(
        self,
        operation: str,
        tensor: Tensor,
        work: Callable[[Statistics], Any],
        async_op: bool,
        *terms: object,
        key: str = "",
        num_items: int = 0,
    ) -> Handle:
        """Run a collective after those submitted before.

        Args:
            operation: Its name.
            tensor: (E,), the bucket; or (k, dim), rows.
            work: Does it, when the ranks have agreed; its result is the handle's.
            async_op: Whether to return at once.
            terms: What else must be the same on all ranks.
            key: Name of the bucket; empty if there is nothing to be learned for it.
            num_items: Rows of a table; -1 if they are not known.

        Raises:
            CommError: A peer was lost or calls something else, or this has been closed.
        """
        number, self._count = self._count, self._count + 1
        numel = tensor.numel() if tensor.dim() == 1 else tensor.shape[1]
        among_all = self._transports[0]
        digest = digest_of(self._terms, key, among_all.stages(tensor), *terms)

        def run(stats: Statistics) -> Any:
            started = time.perf_counter()
            up, down = self._traffic()
            stats.payload_bytes = tensor.nbytes
            if among_all.size > 1:
                took = self._reduction.took_ns(key)
                shape = (numel, tensor.dtype, self._block, took, num_items, digest)
                self._reduction.learn(key, agree(among_all, Header(number, operation, *shape)))
            result = work(stats)
            stats.actual_s = time.perf_counter() - started
            after = self._traffic()
            stats.bytes_up, stats.bytes_down = after[0] - up, after[1] - down
            self.totals.add(stats)
            return result

        handle = self._worker.submit(run, tensor.device)
        if not async_op:
            handle.wait()
        return handle

    def close(self) -> None:
        """End the calls under way, then the thread."""
        self._worker.close()

    def _traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""
        ups = sum(transport.bytes_up for transport in self._transports)
        return ups, sum(transport.bytes_down for transport in self._transports)
