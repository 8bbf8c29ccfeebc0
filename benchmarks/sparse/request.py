# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks sparse``, and its systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from benchmarks.request import ComputeRequest, NonNegativeInt, Positive
from wavemare.cli.options import check_names
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row

if TYPE_CHECKING:
    from benchmarks.sparse.workloads import Workload

DUELIST = "wavemare-auto"
DENSE = ("mpi-dense", "mpi-dense-blocking", "gloo-dense")
"""Systems that send everything; the fastest of them in each case is the baseline."""
_STOCK = ("torch-sparse", "deepspeed-sparse")
_MODES = ("ordered", "packed", "pushpull", "allgather", "auto", "auto-search")
_TOPK = "wavemare-hierarchical-topk"
_DEDICATED = "omnireduce"
_BY_MPI = ("streaming", _DEDICATED)
"""Peers that receive from whichever rank comes first."""
PEERS = (
    "agsparse",
    "sparcml",
    "sparcml-split",
    "sparcml-dsar",
    "sparcml-dsar-qsgd8",
    "sparcml-dsar-qsgd4",
    "parallax",
    "zen",
    "hitopk",
    "deepreduce8",
    "deepreduce4",
    *_BY_MPI,
)
"""Systems of papers."""
DEFAULT_SYSTEMS = (*DENSE, *_STOCK, *(f"wavemare-{name}" for name in _MODES), *PEERS[:2])
SYSTEMS = (
    *DEFAULT_SYSTEMS,
    _TOPK,
    *PEERS[2:],
    *(f"wavemare-{name}-gloo" for name in _MODES),
    *(f"{name}-gloo" for name in PEERS if name not in _BY_MPI),
)
"""Systems of sums. Those of wavemare and the peers without a suffix use MPI. All but the dense
ones and ``auto-search`` get the numbers of the non-zero blocks."""
_SLOW = ("streaming", "agsparse", "sparcml", "sparcml-split", *_STOCK)
_DENSE_LIMIT = 0.4
"""Above this density the slow systems send several times the dense bytes."""
PATTERNS = ("random", "identical", "zipf")
WORKLOAD_NAMES = ("lstm", "deeplight", "ncf", "bert", "vocabulary", "vocabulary-whole")
"""By which `benchmarks.sparse.workloads` has models; that module imports torch."""
TOPK_SHARE = 0.01
"""Of blocks or elements that systems with top-k send."""
STEP_BASELINE = "deepspeed-dense"
STEP_BOUND = "no-communication-bound"
STEP_PEERS = ("parallax", "sparcml", "zen", "streaming")
"""Systems of papers that sum the tables, beside DDP."""
STEP_SYSTEMS = (
    STEP_BASELINE,
    "deepspeed-dense-zero1",
    "deepspeed-sparse",
    "torch-ddp",
    "torch-ddp-sparse",
    *STEP_PEERS,
    "wavemare-ddp",
    "wavemare-ddp-sparse",
    "wavemare-auto",
    "wavemare-auto-gloo",
    "wavemare-auto-zero1",
    "wavemare-auto-zero1-all",
    "wavemare-pushpull",
    "wavemare-topk",
    STEP_BOUND,
)
"""Systems of ``--step``."""
_SUM_COLUMNS = {
    "pattern": Column("pattern"),
    "density": Column("density", "g"),
    "union": Column("union", ".3f"),
    "system": Column("system"),
    "ms": Column("median_s", ".1f", 1000),
    "ratio": Column("ratio", ".2f"),
    "model": Column("model", ".2f"),
    "MiB up": Column("bytes_up", ".1f", 2**-20),
    "used": Column("executor"),
}
_STEP_COLUMNS = {
    "system": Column("system"),
    "ms": Column("median_s", ".1f", 1000),
    "ratio": Column("ratio", ".2f"),
    "comm ms": Column("communication_s", ".1f", 1000),
    "comm ratio": Column("communication_ratio", ".2f"),
    "MiB up": Column("bytes_up", ".2f", 2**-20),
    "link MiB": Column("link_bytes_up", ".2f", 2**-20),
    "density": Column("density", ".3f"),
    "union": Column("union", ".3f"),
    "used": Column("executor"),
}


@dataclass(frozen=True)
class Case:
    """One kind of gradient.

    Args:
        pattern: ``random``: every rank has other blocks; ``identical``: all have the same;
            ``zipf``: low blocks are likelier, as the rows of an embedding sorted by frequency.
        density: Share of a rank's blocks that are not zero.
    """

    pattern: str
    density: float

    @property
    def key(self) -> str:
        """A name."""
        return f"{self.pattern} {self.density:g}"


class SparseRequest(ComputeRequest):
    """Measure ways to sum a sparse gradient over ranks, or whole training steps with --step.

    Dense reductions of MPI and gloo, sparse ones of torch, DeepSpeed and of papers, and wavemare's
    executors. Ratios are to the fastest dense sum; of steps, to stock DeepSpeed's dense reduction.

    For example: python -m benchmarks sparse --mbit 1000 --densities 0.1,0.01 --json result.json
    """

    measured_by: ClassVar[str] = "benchmarks.sparse.measure:measure"
    by_mpi: ClassVar[bool] = True

    ranks: Annotated[int, Field(ge=2)] = 4
    """Processes."""

    mbit: Positive | None = None
    """Speed of each host's link in Mbit/s, on emulated hosts (needs root); by default the ranks
    share this machine's memory."""

    ranks_per_host: PositiveInt = 1
    """Ranks on each emulated host."""

    aggregators: NonNegativeInt = 0
    """Processes beside the ranks that sum for omnireduce; their links are together as fast as those
    of all ranks."""

    mib: Positive = 100.0
    """Size of the gradient in MiB."""

    block: PositiveInt = 256
    """Elements per block."""

    densities: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (1.0, 0.4, 0.1, 0.04, 0.01)
    """Shares of blocks that are not zero."""

    patterns: tuple[str, ...] = PATTERNS
    """Which blocks: random, identical or zipf."""

    systems: tuple[str, ...] | None = None
    """Systems to measure; by default the dense ones, those of torch and DeepSpeed, agsparse,
    sparcml and wavemare's modes over MPI, or all of --step."""

    step: bool = False
    """Measure whole training steps of a BERT classifier of the size below: the gradient of its word
    embedding is sparse."""

    workload: str = "bert"
    """With --step and --compute sleep: the model, with tables and batches as in a paper. By default
    links have the speed at which messages take as long, relative to --step-ms, as in the paper."""

    steps_per_round: PositiveInt = 4
    """With --step: optimizer steps of a system in a round."""

    layers: PositiveInt = 2
    vocabulary: Annotated[int, Field(ge=1000)] = 30_522
    sequence: Annotated[int, Field(ge=8)] = 64
    batch: PositiveInt = 8

    warmups: NonNegativeInt = 2

    duels: NonNegativeInt = 0
    """Extra rounds in which wavemare-auto and the fastest other system of each case run in
    turns; the result has the median of their ratio and its 95 % interval."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The systems to measure."""
        if self.systems is not None:
            return self.systems
        return STEP_SYSTEMS if self.step else DEFAULT_SYSTEMS

    @property
    def model(self) -> Workload:
        """What --workload names."""
        from benchmarks.sparse.workloads import WORKLOADS

        return WORKLOADS[self.workload]

    @property
    def step_block(self) -> int:
        """Elements per block in whole steps: a row of a workload's tables."""
        return self.model.tables[0].width if self.compute == "sleep" else self.block

    @property
    def num_ranks(self) -> int:
        """Number of processes: the ranks and the aggregators behind them."""
        return self.ranks + self.aggregators

    @property
    def columns(self) -> Mapping[str, Column]:  # type: ignore[override]
        """Of the printed table."""
        return _STEP_COLUMNS if self.step else _SUM_COLUMNS

    @property
    def numel(self) -> int:
        """Elements of the gradient: whole blocks."""
        return int(self.mib * 2**20) // 4 // self.block * self.block

    @property
    def cases(self) -> list[Case]:
        """All pairs of pattern and density; at density 1 all patterns are the same."""
        pairs = [Case(pattern, density) for pattern in self.patterns for density in self.densities]
        return [c for c in pairs if c.density < 1 or c.pattern == self.patterns[0]]

    def check(self) -> None:
        """Check values against each other."""
        super().check()
        check_names("--systems", self.chosen, STEP_SYSTEMS if self.step else SYSTEMS)
        check_names("--patterns", self.patterns, PATTERNS, "pattern")
        check_names("--workload", (self.workload,), WORKLOAD_NAMES, "workload")
        if self.compute == "sleep" and not self.step:
            reason = "a sum has no computation beside it"
            raise ConfigError("--compute", self.compute, reason, "Add --step")
        if self.compute == "real" and self.workload != "bert":
            reason = "on processors, a BERT classifier is trained"
            raise ConfigError("--workload", self.workload, reason, "Add --compute sleep")
        if self.duels and (self.step or self.aggregators or DUELIST not in self.chosen):
            reason = f"it compares {DUELIST} with the fastest other system of a sum"
            remedy = f"Measure {DUELIST}, without --step and --aggregators"
            raise ConfigError("--duels", self.duels, reason, remedy)
        if not self.densities:
            raise ConfigError("--densities", [], "there is nothing to measure", "Give 0 to 1")
        if (_DEDICATED in self.chosen) != (self.aggregators > 0):
            reason = f"{_DEDICATED} needs some, and no other system uses them"
            raise ConfigError("--aggregators", self.aggregators, reason, "Give both or neither")
        if self.ranks % self.ranks_per_host or self.aggregators % self.ranks_per_host:
            reason = f"{self.ranks} ranks and {self.aggregators} aggregators cannot fill all hosts"
            raise ConfigError("--ranks-per-host", self.ranks_per_host, reason, "Give a divisor")

    def obstacle(self, system: str, case: Case) -> str | None:
        """Return why a system is not measured in a case, or None."""
        if system.removesuffix("-gloo") in _SLOW and case.density > _DENSE_LIMIT:
            return f"it sends several times the dense bytes above a density of {_DENSE_LIMIT:g}"
        return None

    def run(self) -> dict[str, Any]:
        """Run the ranks on this machine, or on emulated hosts if links have a speed."""
        from benchmarks.cluster import EmulatedCluster
        from benchmarks.run import run_ranks

        if self.compute == "sleep" and self.mbit is None:
            mbit = self.model.mbit(self.step_ms / 1000)
            return self.model_copy(update={"mbit": mbit}).run()
        if self.mbit is None:
            return run_ranks(self)
        each = self.ranks_per_host
        with EmulatedCluster(self.num_ranks // each, self.mbit) as cluster:
            if self.aggregators:
                behind = range(self.ranks // each, self.num_ranks // each)
                cluster.shape(self.mbit * self.ranks / self.aggregators, behind)
            return run_ranks(self, cluster=cluster, ranks_per_host=each)

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        where = f"{self.mbit:g} Mbit/s" if self.mbit else "this machine's memory"
        if self.ranks_per_host > 1:
            where += f" between hosts of {self.ranks_per_host}"
        if self.aggregators:
            where += f" and {self.aggregators} aggregators"
        if self.compute == "sleep":
            weights, milliseconds = self.model.numel / 1e6, self.step_ms
            where = f"{result['mbit']:.0f} Mbit/s"
            return (
                f"{self.ranks} ranks over {where}: {self.workload}, {weights:.1f} M weights, "
                f"passes sleep for {milliseconds:g} ms"
            )
        if not self.step:
            return f"{self.ranks} ranks over {where}, {self.mib:g} MiB, blocks of {self.block}"
        return (
            f"{self.ranks} ranks over {where}: BERT, {self.layers} layers of {self.hidden}, "
            f"{self.vocabulary} tokens, {self.batch} x {self.sequence} per rank"
        )

    def case(self, row: Row) -> str:
        """Return pattern and density."""
        return "step" if self.step else Case(row["pattern"], row["density"]).key
