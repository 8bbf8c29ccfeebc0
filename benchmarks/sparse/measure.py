# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks sparse``: sum gradients of known sparsity, and check each sum."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.sparse_tensor import SparseTensor
from torch import Tensor

from benchmarks.ranks import interleaved, ratio_row
from benchmarks.sparse.peers import PEERS, OmniReduce
from benchmarks.sparse.peers.base import AnySource, Bench, nonzero_rows
from benchmarks.sparse.request import DENSE, DUELIST, TOPK_SHARE, Case, SparseRequest
from wavemare.comm import SparseComm
from wavemare.comm.collective_queue import Statistics
from wavemare.comm.config import CompressorConfig
from wavemare.comm.cost import Constants, traffic
from wavemare.comm.masks import Masks
from wavemare.comm.transport import Transport, open_transport
from wavemare.errors import CommError
from wavemare.observe import Screen


@dataclass(frozen=True)
class Network:
    """The processes of a benchmark.

    Args:
        everyone: Over MPI, among ranks and aggregators.
        ranks: Over MPI, among the ranks; of an aggregator, among the aggregators.
        group: The ranks, for torch; None if all processes are ranks.
    """

    everyone: AnySource
    ranks: Transport
    group: dist.ProcessGroup | None

    def close(self) -> None:
        """Close both transports."""
        if self.ranks is not self.everyone:
            self.ranks.close()
        self.everyone.close()


def open_network(request: SparseRequest, timeout_s: float) -> Network:
    """Open it; collective over all processes."""
    from benchmarks.sparse.peers.any_source import AnySourceMpi

    everyone = AnySourceMpi(timeout_s=timeout_s)
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
            device="cpu",
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
            setattr(engine, name, MethodType(getattr(deepspeed.DeepSpeedEngine, name), engine))
        self._engine = engine

    def sum(self) -> Any:
        reduced = self._engine.sparse_allreduce(SparseTensor(self.sparse), self._group)
        return reduced.to_coo_tensor()


def build_system(
    name: str, network: Network, request: SparseRequest, constants: dict[str, Constants]
) -> Bench:
    """Build a system; all ranks must call it together.

    Args:
        name: One of `benchmarks.sparse.request.SYSTEMS`.
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


BASELINE = "best-dense"
_TIMEOUT_S = 120.0
_AGGREGATORS_TIMEOUT_S = 3600.0
"""Seconds that an aggregator waits while other systems take their turns."""
_ZIPF_EXPONENT = 1.1
_KERNEL_PHASES = ("mask", "plan", "pack", "reduce", "unpack")


class Sample(NamedTuple):
    """One call.

    Args:
        seconds: Of the slowest rank.
        statistics: Of rank 0; None for other systems than wavemare's.
    """

    seconds: float
    statistics: Statistics | None = None


Measured = Mapping[Case, Mapping[str, Sequence[Sample]]]


def measure(request: SparseRequest) -> dict[str, Any]:
    """Build all systems, run all rounds of all cases and return the result.

    Raises:
        CommError: A sum is wrong.
    """
    torch.set_num_threads(1)
    if request.step:
        from benchmarks.sparse.step import measure_step

        return measure_step(request)
    network = open_network(request, _TIMEOUT_S)
    if network.everyone.rank >= request.ranks:
        return _aggregate(request, network)
    constants: dict[str, Constants] = {}
    # The first one measures the constants for the others.
    names = sorted(request.chosen, key=lambda name: "auto" not in name)
    systems = {name: build_system(name, network, request, constants) for name in names}
    measured: dict[Case, dict[str, list[Sample]]] = {}
    duels: list[dict[str, Any]] = []
    screen = Screen(rank=network.ranks.rank)
    for case in request.cases:
        screen.note(f"{case.pattern}, density {case.density:g}")
        names = [name for name in request.chosen if request.obstacle(name, case) is None]
        own = {name: systems[name] for name in names}
        measured[case] = _measure_case(request, case, own, network)
        if request.duels and any(not name.startswith(DUELIST) for name in names):
            duels.append(_duel(request, case, measured[case], systems, network))
    for system in systems.values():
        system.close()
    # A message among everyone would reach an aggregator that still receives from any worker.
    network.ranks.barrier()
    network.close()
    result = build_result(request, measured, constants)
    return {**result, "duels": duels} if duels else result


def _duel(
    request: SparseRequest,
    case: Case,
    surveyed: Mapping[str, Sequence[Sample]],
    systems: Mapping[str, Bench],
    network: Network,
) -> dict[str, Any]:
    """Run `DUELIST` and the fastest other system of a case in turns."""
    others = {
        name: median(sample.seconds for sample in samples)
        for name, samples in surveyed.items()
        if not name.startswith(DUELIST)
    }
    fastest = min(others, key=others.__getitem__)
    rounds = request.model_copy(update={"rounds": request.duels})
    pair = {name: systems[name] for name in (fastest, DUELIST)}
    samples = _measure_case(rounds, case, pair, network)
    own, other = ([s.seconds for s in samples[name]] for name in (DUELIST, fastest))
    low, middle, high = ratio_interval(own, other)
    executor = samples[DUELIST][-1].statistics
    return {
        "pattern": case.pattern,
        "density": case.density,
        "fastest": fastest,
        "executor": executor.executor if executor else None,
        "ratio": middle,
        "interval": [low, high],
        "rounds_s": {DUELIST: own, fastest: other},
    }


def ratio_interval(own: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of other / own over paired rounds within its 95 % interval (bootstrap)."""
    ratios = np.asarray(other) / np.asarray(own)
    draws = np.random.default_rng(0).choice(ratios, (10_000, ratios.size))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(np.median(ratios)), float(high)


def _aggregate(request: SparseRequest, network: Network) -> dict[str, Any]:
    """Be an aggregator of omnireduce in all of its turns."""
    network.everyone.timeout_s = _AGGREGATORS_TIMEOUT_S
    system = OmniReduce("omnireduce", network.everyone, request)
    for _ in range(len(request.cases) * (request.warmups + request.rounds)):
        system.aggregate()
    network.close()
    return {}


def _measure_case(
    request: SparseRequest, case: Case, systems: Mapping[str, Bench], network: Network
) -> dict[str, list[Sample]]:
    gradient = make_gradient(case, request.numel, request.block, network.ranks.rank)
    expected, magnitude = gradient.clone(), gradient.abs()
    dist.all_reduce(expected, group=network.group)
    dist.all_reduce(magnitude, group=network.group)
    working = torch.empty_like(gradient)
    samples: dict[str, list[Sample]] = {name: [] for name in systems}
    for system in systems.values():
        system.reset()
    checked = set()
    for timed, name in interleaved(request, list(systems), lambda line: None):
        system = systems[name]
        working.copy_(gradient)
        system.prepare(case, working)
        seconds, summed = _timed(system, network.ranks)
        if name not in checked:
            result, lost = system.result(summed), magnitude
            lacking = system.left_out()
            if lacking is not None:
                lacking, lost = lacking.clone(), lacking.abs()
                dist.all_reduce(lacking, group=network.group)
                dist.all_reduce(lost, group=network.group)
                result, lost = result + lacking, magnitude + lost
            _check(name, case, result, expected, request.ranks * lost)
            checked.add(name)
        if timed:
            samples[name].append(Sample(seconds, system.statistics))
    return samples


def _timed(system: Bench, transport: Transport) -> tuple[float, Any]:
    """Time one call, from a barrier to the end of the slowest rank; return its sum too."""
    transport.barrier()
    started = time.perf_counter()
    summed = system.sum()
    mine = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    table = torch.empty(transport.size, 1, dtype=torch.float64)
    transport.all_gather(mine, table)
    return float(table.max()), summed


def _check(name: str, case: Case, result: Tensor, expected: Tensor, size: Tensor) -> None:
    """Check a sum within rounding: |error| <= 2^-23 of N times the sum of magnitudes."""
    bound = 2.0**-23 * size
    if not bool(((result - expected).abs() <= bound).all()):
        worst = float((result - expected).abs().max())
        reason = f"its sum is off by up to {worst:g} ({case.key})"
        raise CommError("system", name, reason, "Report this: its measurements mean nothing")


def build_result(
    request: SparseRequest, measured: Measured, constants: Mapping[str, Constants]
) -> dict[str, Any]:
    """Return the result without command and machine."""
    return {
        "baseline": BASELINE,
        "mebibytes": request.mib,
        "block": request.block,
        "constants": {kind: asdict(values) for kind, values in constants.items()},
        "rows": [
            _row(request, case, name, rounds, systems)
            for case, systems in measured.items()
            for name, rounds in systems.items()
        ],
        "skipped": [
            {"system": name, "pattern": case.pattern, "density": case.density, "reason": reason}
            for case in request.cases
            for name in request.chosen
            if (reason := request.obstacle(name, case)) is not None
        ],
    }


def _row(
    request: SparseRequest,
    case: Case,
    name: str,
    rounds: Sequence[Sample],
    systems: Mapping[str, Sequence[Sample]],
) -> dict[str, Any]:
    dense = [[sample.seconds for sample in systems[each]] for each in DENSE if each in systems]
    fastest = min(dense, key=median) if dense else None
    row: dict[str, Any] = {
        "system": name,
        "ranks": request.ranks,
        "mbit": request.mbit,
        "pattern": case.pattern,
        "density": case.density,
        **ratio_row([sample.seconds for sample in rounds], fastest),
    }
    last = rounds[-1].statistics
    if last is not None:
        phases = [s.statistics.phases_s for s in rounds if s.statistics is not None]
        row |= {
            "executor": last.executor,
            "union": last.union,
            "bytes_up": last.bytes_up,
            "bytes_down": last.bytes_down,
            "predicted_s": last.predicted_s,
            "phases_s": {key: median(p.get(key, 0.0) for p in phases) for key in phases[-1]},
        }
        row["model_s"] = _model(request, case, row)
        if row["model_s"] is not None and fastest is not None:
            row["model"] = median(fastest) / row["model_s"]
    return row


def _model(request: SparseRequest, case: Case, row: Mapping[str, Any]) -> float | None:
    """Return the theoretical seconds: bytes over the link's rate, and measured kernels."""
    if request.mbit is None or request.ranks_per_host > 1:
        return None  # hosts would share a link
    blocks = request.numel // request.block
    table = np.zeros((request.ranks, blocks), dtype=bool)
    for rank in range(request.ranks):
        table[rank, active_blocks(case, blocks, rank)] = True
    moved = traffic(Masks.of(table), request.block * 4).get(row["executor"])
    if moved is None:
        return None
    kernels = sum(row["phases_s"].get(phase, 0.0) for phase in _KERNEL_PHASES)
    return max(moved.up, moved.down) / (request.mbit * 1e6 / 8) + kernels


def active_blocks(case: Case, num_blocks: int, rank: int) -> np.ndarray:
    """Return the numbers of the blocks that are not zero on a rank, ascending."""
    count = round(num_blocks * case.density)
    generator = np.random.default_rng(7 if case.pattern == "identical" else 1000 + rank)
    if case.pattern == "zipf":
        likelihood = np.arange(1, num_blocks + 1) ** -_ZIPF_EXPONENT
        likelihood /= likelihood.sum()
        chosen = generator.choice(num_blocks, count, replace=False, p=likelihood)
    else:
        chosen = generator.permutation(num_blocks)[:count]
    return np.sort(chosen)


def make_gradient(case: Case, numel: int, block: int, rank: int) -> Tensor:
    """Return (numel,), float32: normally distributed in its active blocks, else zero."""
    blocks = active_blocks(case, numel // block, rank)
    flat = torch.zeros(numel)
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(len(blocks), block, generator=generator)
    flat.view(-1, block)[torch.from_numpy(blocks)] = values
    return flat
