# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks planner``, and the jobs that it consists of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from benchmarks.request import GptRequest, Positive
from wavemare.cli.options import check_names
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row

BASELINE = "equal"
PLANNED = "planned"
"""The system whose layout is made from measured speeds."""
SHARES, CUTS, CHOICE = "shares", "cuts", "choice"
PARTS = (SHARES, CUTS, CHOICE)
SCHEDULES = ("1f1b", "pipemare")
LIKE, UNLIKE, HOSTS = "like", "unlike", "hosts"
CLUSTERS = (LIKE, UNLIKE, HOSTS)
"""Four like ranks; two fast and two slow ranks; four like ranks on two hosts with a slow link."""
ORDER = "WAVEMARE_BENCH_ORDER"
"""Variable on emulated hosts: the device of each rank, with commas."""
_CLUSTER_RANKS = 4
_MOST_OF_A_CORE = 0.9


class _Size(GptRequest):
    layers: PositiveInt = 12
    hidden: PositiveInt = 128
    heads: PositiveInt = 4
    vocabulary: PositiveInt = 32
    sequence: Annotated[int, Field(ge=2)] = 64
    batch: PositiveInt = 12

    micro_steps: PositiveInt = 4
    """Micro-batches per optimizer step where ranks share samples."""

    micro_batches: PositiveInt = 8
    """Micro-batches per optimizer step of a pipeline."""


class PlannerJob(_Size):
    """The work of one group of ranks."""

    measured_by: ClassVar[str] = "benchmarks.planner.measure:measure"

    part: str
    """Of `PARTS`; ``probe`` and ``trial`` make up the choice."""

    ranks: int
    """Processes."""

    devices: tuple[float, ...]
    """Each rank's share of a core."""

    schedule: str = SCHEDULES[0]
    """Of a pipeline."""

    layout: str = ""
    """Layout of a trial, as JSON text."""

    def prepare(self) -> None:
        """Become the rank that this process's device runs."""
        if ORDER in os.environ:
            order = [int(text) for text in os.environ[ORDER].split(",")]
            os.environ["RANK"] = str(order.index(int(os.environ["RANK"])))


class PlannerRequest(_Size):
    """Measure layouts for unlike devices beside equal parts.

    CPU quotas (they need root) make devices of different speed of one machine's processes. Shares
    of samples (half of the ranks are slow) and cuts of a pipeline (its first rank is slow, then its
    last) are made from measured speeds. The planner's choice for four ranks stands beside the best
    layouts of all other axes.

    For example: python -m benchmarks planner --parts shares --ranks 2 --json result.json
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "case": Column("case"),
        "system": Column("system"),
        "shares": Column("shares"),
        "cuts": Column("cuts"),
        "chosen": Column("chosen"),
        "ms": Column("median_s", ".0f", 1000),
        "predicted": Column("predicted_s", ".0f", 1000),
        "ratio": Column("ratio", ".3f"),
        "ideal": Column("ideal", ".3f"),
        "of it": Column("bound_fraction", ".1%"),
    }

    parts: tuple[str, ...] = PARTS
    """Parts to measure: shares, cuts, choice."""

    ranks: tuple[Annotated[int, Field(ge=2)], ...] = (2, 4)
    """Processes, one or several numbers."""

    schedules: tuple[str, ...] = SCHEDULES
    """Schedules of the pipelines: 1f1b, pipemare."""

    factor: Annotated[float, Field(ge=1)] = 2.0
    """Speed of the fast ranks over that of the slow ones."""

    load: Annotated[float, Field(gt=0, le=1)] = 0.675
    """Part of all cores that the ranks use together."""

    clusters: tuple[str, ...] = CLUSTERS
    """For the choice: like, unlike, or hosts (emulated)."""

    mbit: Positive = 200.0
    """Speed of the emulated hosts' links in Mbit/s."""

    def check(self) -> None:
        """Check values against each other."""
        super().check()
        check_names("--parts", self.parts, PARTS, "part")
        check_names("--clusters", self.clusters, CLUSTERS, "cluster")
        check_names("--schedules", self.schedules, SCHEDULES, "schedule")
        if not self.ranks:
            raise ConfigError("--ranks", [], "there is nothing to measure", "Give 2 or more")
        for ranks in self.ranks:
            if SHARES in self.parts and ranks % 2:
                reason = "half of the ranks are slow"
                raise ConfigError("--ranks", ranks, reason, "Give even numbers")
            if CUTS in self.parts and self.layers < ranks:
                reason = f"{ranks} stages need as many blocks"
                raise ConfigError("--layers", self.layers, reason, f"Give {ranks} or more")

    def run(self) -> dict[str, Any]:
        """Run all jobs, one after the other."""
        from benchmarks.planner.run import run_jobs

        return run_jobs(self)

    def jobs(self, cores: int) -> Iterator[PlannerJob]:
        """Yield the jobs of shares and cuts."""
        for ranks in self.ranks:
            fast, half = (self.factor,) * (ranks - 1), ranks // 2
            if SHARES in self.parts:
                yield self._job(SHARES, (self.factor,) * half + (1.0,) * half, cores)
            for speeds in ((1.0, *fast), (*fast, 1.0)) if CUTS in self.parts else ():
                for schedule in self.schedules:
                    yield self._job(CUTS, speeds, cores, schedule=schedule)

    def cluster_jobs(self, cores: int) -> Iterator[tuple[str, PlannerJob]]:
        """Yield each cluster of the choice, with a job that probes it."""
        half = _CLUSTER_RANKS // 2
        for name in self.clusters if CHOICE in self.parts else ():
            fast = self.factor if name == UNLIKE else 1.0
            yield name, self._job("probe", (fast,) * half + (1.0,) * half, cores)

    def _job(self, part: str, speeds: Sequence[float], cores: int, **values: Any) -> PlannerJob:
        shared = {name: getattr(self, name) for name in _Size.model_fields}
        # Each rank's share of a core is in proportion to its speed.
        scale = min(_MOST_OF_A_CORE / max(speeds), self.load * cores / sum(speeds))
        devices = tuple(speed * scale for speed in speeds)
        return PlannerJob(part=part, ranks=len(speeds), devices=devices, **shared, **values)

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        return (
            f"unlike devices by {result['throttle']}: GPT, {self.layers} layers of "
            f"{self.hidden}, micro-batches of {self.batch} x {self.sequence}"
        )

    def case(self, row: Row) -> str:
        """Return part and devices."""
        return str(row["case"])
