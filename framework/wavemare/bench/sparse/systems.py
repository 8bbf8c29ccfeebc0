# SPDX-License-Identifier: Apache-2.0
"""The systems that `wavemare bench sparse` compares, each ready to sum a bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sparse_tensor import SparseTensor
from torch import Tensor

from wavemare.bench.sparse.peers import PEERS, OmniReduce
from wavemare.bench.sparse.peers.base import Bench, nonzero_rows
from wavemare.bench.sparse.request import DENSE, TOPK_SHARE, Case, SparseRequest
from wavemare.comm import SparseComm
from wavemare.comm.config import CompressorConfig
from wavemare.comm.selection.cost import Constants
from wavemare.comm.transport import Transport, open_transport


@dataclass(frozen=True)
class Network:
    """The processes of a benchmark.

    Args:
        everyone: Over MPI, among ranks and aggregators.
        ranks: Over MPI, among the ranks; of an aggregator, among the aggregators.
        group: The ranks, for torch; None if all processes are ranks.
    """

    everyone: Transport
    ranks: Transport
    group: dist.ProcessGroup | None

    def close(self) -> None:
        """Close both transports."""
        if self.ranks is not self.everyone:
            self.ranks.close()
        self.everyone.close()


def open_network(request: SparseRequest, timeout_s: float) -> Network:
    """Open it; collective over all processes."""
    everyone = open_transport(choice="mpi", timeout_s=timeout_s)
    if not request.aggregators:
        return Network(everyone, everyone, None)
    ranks = everyone.split(int(everyone.rank >= request.ranks))
    return Network(everyone, ranks, dist.new_group(list(range(request.ranks))))


class _Plain(Bench):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self._function = function

    def sum(self) -> Any:
        self._function(self.bucket)


class _Wavemare(Bench):
    def __init__(self, transport: Transport, mode: str, **options: Any) -> None:
        self._searches = mode.endswith("-search")
        mode = mode.removesuffix("-search")
        self.comm = SparseComm(
            transport,
            mode=mode,  # type: ignore[arg-type]
            average=False,
            deterministic=mode != "packed",
            **options,
        )

    def prepare(self, case: Case, gradient: Tensor) -> None:
        super().prepare(case, gradient)
        self._blocks = None if self._searches else nonzero_rows(gradient.view(-1, self.comm.block))

    def sum(self) -> Any:
        key = self.case.key if self.case else None
        self.statistics = self.comm.allreduce_(self.bucket, key=key, blocks=self._blocks).stats

    def close(self) -> None:
        self.comm.close()


class _HierarchicalTopK(_Wavemare):
    """Each rank's top blocks are chosen, then summed within its host and between hosts."""

    def __init__(self, transport: Transport, **options: Any) -> None:
        compressor = CompressorConfig(type="block_topk", ratio=TOPK_SHARE)
        super().__init__(transport, "auto", hierarchical=True, compressor=compressor, **options)

    def reset(self) -> None:
        state = self.comm.state_dict()["compressor"]
        self.comm.load_state_dict({"compressor": {**state, "steps": {}, "residuals": {}}})

    def left_out(self) -> Tensor | None:
        (residual,) = self.comm.state_dict()["compressor"]["residuals"].values()
        return residual


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
        return summed.to_dense().flatten()


class _TorchSparse(_Rows):
    def __init__(self, block: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(block)
        self._group = group

    def sum(self) -> Any:
        dist.all_reduce(self.sparse, group=self._group)
        return self.sparse


class _DeepSpeedSparse(_TorchSparse):
    """DeepSpeed's own methods, on an engine without anything else."""

    def __init__(self, block: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(block, group)
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
        reduced = self._engine.sparse_allreduce(SparseTensor(self.sparse), self._group)
        return reduced.to_coo_tensor()


def build_system(
    name: str, network: Network, request: SparseRequest, constants: dict[str, Constants]
) -> Bench:
    """Build a system; all ranks must call it together.

    Args:
        name: One of `wavemare.bench.sparse.request.SYSTEMS`.
        network: Of all processes.
        request: Has the elements per block.
        constants: Of the cost model by kind of transport; the first ``auto`` fills them in.
    """
    if name in DENSE:
        return _Plain(_dense(name, network))
    if name == "torch-sparse":
        return _TorchSparse(request.block, network.group)
    if name == "deepspeed-sparse":
        return _DeepSpeedSparse(request.block, network.group)
    kind = "gloo" if name.endswith("-gloo") else "mpi"
    name = name.removesuffix("-gloo")
    if kind == "gloo":
        transport = open_transport(network.group, choice="torch")
    elif PEERS.get(name) is OmniReduce:
        transport = network.everyone
    else:
        transport = network.ranks.split(0)
    if name in PEERS:
        return PEERS[name](name, transport, request)
    options = {"block": request.block, "constants": constants.get(kind)}
    if name == "wavemare-hierarchical-topk":
        return _HierarchicalTopK(transport, **options)
    mode = name.removeprefix("wavemare-")
    system = _Wavemare(transport, mode, **options)
    if mode == "auto":
        constants[kind] = system.comm.constants
    return system


def _dense(name: str, network: Network) -> Callable[[Tensor], Any]:
    """Return a dense reduction."""
    if name == "mpi-dense":
        return network.ranks.all_reduce
    if name == "gloo-dense":
        return partial(dist.all_reduce, group=network.group)
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD.Get_group()
    ranks = MPI.COMM_WORLD.Create_group(everyone.Incl(list(range(network.ranks.size))))

    def reduce(flat: Tensor) -> None:
        ranks.Allreduce(MPI.IN_PLACE, [flat.numpy(), MPI.FLOAT])

    return reduce
