# SPDX-License-Identifier: Apache-2.0
"""Systems of papers in whole steps: a peer sums the tables, and torch's DDP the other parameters.

Parallax (EuroSys'19) is this hybrid with parameter servers for the tables. The others get the same
place, so that all differ in the sum of the tables alone. Sums run in the background as soon as a
gradient is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.sparse.peers import PEERS, OmniReduce, Peer
from wavemare.comm.gradient_rows import GradientRows, Slot
from wavemare.comm.transport import open_transport


class Size(NamedTuple):
    """What a peer asks of a request.

    Args:
        numel: Elements of the table.
        block: Of a row.
        ranks: Number of ranks.
        aggregators: None: the ranks aggregate.
    """

    numel: int
    block: int
    ranks: int
    aggregators: int = 0


class HybridModel:
    """A model whose gradients are averaged in the backward pass.

    Args:
        name: Of the peer.
        model: To be trained.
        tables: Its large embeddings, with dense gradients.
        ranks: Number of ranks.

    Attributes:
        wrapped: Runs the model.
    """

    def __init__(
        self, name: str, model: nn.Module, tables: Sequence[nn.Embedding], ranks: int
    ) -> None:
        if issubclass(PEERS[name], OmniReduce):
            from benchmarks.sparse.peers.any_source import AnySourceMpi

            self._transport: Any = AnySourceMpi()
        else:
            self._transport = open_transport(choice="mpi")
        self._ranks = ranks
        self._queue = ThreadPoolExecutor(1)
        self._pending: list[Future[None]] = []
        names = {id(weight): key for key, weight in model.named_parameters()}
        own: dict[str, Any] = {names[id(table.weight)]: table.weight for table in tables}
        self._rows = GradientRows(model, own)
        for key, weight in own.items():
            size: Any = Size(weight.numel(), weight.shape[1], ranks)
            start = partial(self._start, key, PEERS[name](name, self._transport, size))
            weight.register_post_accumulate_grad_hook(start)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(own))
        self.wrapped = DistributedDataParallel(model)

    @property
    def bytes_up(self) -> int:
        """Bytes of tables that this rank has sent so far."""
        return int(self._transport.bytes_up)

    def _start(self, key: str, peer: Peer, weight: Tensor) -> None:
        assert weight.grad is not None
        rows = self._rows.take([Slot(key, 0, weight.numel())], weight.shape[1])
        assert rows is not None
        self._pending.append(self._queue.submit(self._sum, peer, weight.grad, rows))

    def _sum(self, peer: Peer, gradient: Tensor, rows: Tensor) -> None:
        rows = rows.unique()
        gradient[rows] /= self._ranks
        peer.sum_blocks(gradient, rows)

    def wait(self) -> None:
        """Wait for the sums of the tables."""
        for each in self._pending:
            each.result()
        self._pending.clear()

    def close(self) -> None:
        """End the thread and the transport."""
        self._queue.shutdown()
        self._rows.close()
        self._transport.close()
