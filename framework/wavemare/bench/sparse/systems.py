# SPDX-License-Identifier: Apache-2.0
"""The systems that `wavemare bench sparse` compares, each ready to sum a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sparse_tensor import SparseTensor
from torch import Tensor

from wavemare.bench.sparse.peers import PEERS
from wavemare.bench.sparse.request import DENSE, Case
from wavemare.comm import SparseComm
from wavemare.comm.selection.cost import Constants
from wavemare.comm.statistics import Statistics
from wavemare.comm.transport import Transport, open_transport

__all__ = ["Bench", "build_system"]


class Bench(ABC):
    """One system on one rank."""

    statistics: Statistics | None = None

    def prepare(self, case: Case, gradient: Tensor) -> None:
        """Take a gradient, in the form that a model would give to the collective."""
        self.case = case
        self.bucket = gradient

    @abstractmethod
    def sum(self) -> Any:
        """Sum over all ranks; this is timed."""

    def result(self, summed: Any) -> Tensor:
        """Return the sum as a flat dense tensor, to be checked."""
        return self.bucket

    def close(self) -> None:
        """Close the collective."""
        return None


def nonzero_rows(table: Tensor) -> Tensor:
    """Return the numbers of a table's rows that are not zero: a model knows them."""
    return table.abs().amax(dim=1).nonzero().flatten()


class _Plain(Bench):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self._function = function

    def sum(self) -> Any:
        self._function(self.bucket)


class _Wavemare(Bench):
    def __init__(self, mode: str, kind: str, block: int, constants: Constants | None) -> None:
        self._searches = mode.endswith("-search")
        mode = mode.removesuffix("-search")
        self.comm = SparseComm(
            transport="torch" if kind == "gloo" else "mpi",
            mode=mode,  # type: ignore[arg-type]
            block=block,
            average=False,
            deterministic=mode != "packed",
            constants=constants,
        )

    def prepare(self, case: Case, gradient: Tensor) -> None:
        super().prepare(case, gradient)
        self._blocks = None if self._searches else nonzero_rows(gradient.view(-1, self.comm.block))

    def sum(self) -> Any:
        key = self.case.key
        handle = self.comm.allreduce_(self.bucket, key=key, blocks=self._blocks)
        self.statistics = handle.stats

    def close(self) -> None:
        self.comm.close()


class _Peer(Bench):
    """A collective of another system over our transport."""

    def __init__(self, name: str, transport: Transport, *, owned: bool) -> None:
        self._name = name
        self._transport = transport
        self._owned = owned

    def sum(self) -> Any:
        network = self._transport
        up, down = network.bytes_up, network.bytes_down
        PEERS[self._name](self.bucket, network)
        up, down = network.bytes_up - up, network.bytes_down - down
        self.statistics = Statistics(self._name, bytes_up=up, bytes_down=down)

    def close(self) -> None:
        if self._owned:
            self._transport.close()


class _Rows(Bench):
    """Takes blocks as the rows of a torch sparse tensor, the form of an embedding's gradient."""

    def __init__(self, block: int) -> None:
        self._block = block

    def prepare(self, case: Case, gradient: Tensor) -> None:
        super().prepare(case, gradient)
        table = gradient.view(-1, self._block)
        ids = nonzero_rows(table)
        self.sparse = torch.sparse_coo_tensor(
            ids.unsqueeze(0),
            table[ids],
            table.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def result(self, summed: Any) -> Tensor:
        dense: Tensor = summed.to_dense()
        return dense.flatten()


class _TorchSparse(_Rows):
    def sum(self) -> Any:
        dist.all_reduce(self.sparse)
        return self.sparse


class _DeepSpeedSparse(_Rows):
    """DeepSpeed's own methods, on an engine without anything else."""

    def __init__(self, block: int) -> None:
        super().__init__(block)
        engine = SimpleNamespace(
            communication_data_type=torch.float32,
            gradient_average=False,
            device=torch.device("cpu"),
        )
        for name in ("sparse_allreduce", "sparse_all_gather", "all_gather_scalar"):
            method = getattr(deepspeed.DeepSpeedEngine, name)
            setattr(engine, name, MethodType(method, engine))
        self._engine = engine

    def sum(self) -> Any:
        reduced = self._engine.sparse_allreduce(SparseTensor(self.sparse), None)
        return reduced.to_coo_tensor()


def build_system(
    name: str, transport: Transport, block: int, constants: dict[str, Constants]
) -> Bench:
    """Build a system; all ranks must call it together.

    Args:
        name: One of `wavemare.bench.sparse.request.SYSTEMS`.
        transport: Over MPI.
        block: Elements per block.
        constants: Of the cost model by kind of transport; the first ``auto`` fills them in.
    """
    if name in DENSE:
        return _Plain(_dense(name, transport))
    if name == "torch-sparse":
        return _TorchSparse(block)
    if name == "deepspeed-sparse":
        return _DeepSpeedSparse(block)
    peer = name.removesuffix("-gloo")
    if peer in PEERS:
        owned = name.endswith("-gloo")
        network = open_transport(choice="torch") if owned else transport
        return _Peer(peer, network, owned=owned)
    mode = name.removeprefix("wavemare-")
    kind = "gloo" if mode.endswith("-gloo") else "mpi"
    mode = mode.removesuffix("-gloo")
    known = constants.get(kind)
    system = _Wavemare(mode, kind, block, known)
    if mode == "auto":
        constants[kind] = system.comm.constants
    return system


def _dense(name: str, transport: Transport) -> Callable[[Tensor], Any]:
    """Return a dense reduction."""
    if name == "mpi-dense":
        return transport.all_reduce
    if name == "gloo-dense":
        return dist.all_reduce
    from mpi4py import MPI

    def reduce(flat: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, [flat.numpy(), MPI.FLOAT])

    return reduce
