# SPDX-License-Identifier: Apache-2.0
"""What shall be measured, as the command line gives it to the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from wavemare.bench.options import (
    MpiRequest,
    Request,
    check_heads,
    check_least,
    check_names,
    check_positive,
)
from wavemare.errors import ConfigError

__all__ = [
    "ALONE",
    "BASELINE",
    "CHOICE",
    "CLUSTERS",
    "CUTS",
    "HOSTS",
    "PARTS",
    "PASSES",
    "PLANNED",
    "PROBE",
    "SCHEDULES",
    "SHARES",
    "TRIAL",
    "WhaleJob",
    "WhaleRequest",
    "device_shares",
]

BASELINE = "equal"
"""All ratios are to it."""
PLANNED = "planned"
"""The system whose plan was made from measured speeds."""
ALONE = "no-communication-bound"
"""Each rank's passes of equal shares by themselves: tells how unlike the ranks are."""
PASSES = "planned-passes"
"""The same of planned shares: what these are worth without an engine around them."""
SHARES, CUTS, CHOICE = "shares", "cuts", "choice"
PARTS = (SHARES, CUTS, CHOICE)
"""All there are, in the order in which they are measured."""
SCHEDULES = ("1f1b", "pipemare")
PROBE, TRIAL = "probe", "trial"
"""What groups of ranks do for `CHOICE`."""
LIKE, UNLIKE, HOSTS = "like", "unlike", "hosts"
CLUSTERS = (LIKE, UNLIKE, HOSTS)
"""What the planner is tried on: four like ranks, two fast and two slow ones, four like ones on two
hosts with a slow link between them."""

_LEAST_RANKS = 2
_CLUSTER_RANKS = 4
_MAY_BE_NONE = ("warmups", "patience")
_MOST_OF_A_CORE = 0.9
_LEAST_SEQUENCE = 2


@dataclass(frozen=True, kw_only=True)
class Size(Request):
    """What is trained, and how often.

    Args:
        rounds: Timed rounds; `warmups` more before them.
        warmups: Untimed rounds.
        patience: Seconds in all, for each group of ranks, for which steps that other programs
            disturb are measured again.
        layers: Blocks of the GPT.
        hidden: Its width.
        heads: Of each block.
        vocabulary: Tokens.
        sequence: Tokens per sequence.
        batch: Sequences per micro-batch, mean over the ranks.
        micro_steps: Micro-batches of a step where ranks share samples.
        micro_batches: Micro-batches of a step of a pipeline.
    """

    rounds: int = 5
    warmups: int = 1
    patience: int = 0
    layers: int = 12
    hidden: int = 128
    heads: int = 4
    vocabulary: int = 32
    sequence: int = 64
    batch: int = 12
    micro_steps: int = 4
    micro_batches: int = 8


@dataclass(frozen=True, kw_only=True)
class WhaleJob(Size, MpiRequest):
    """What one group of ranks measures.

    Args:
        part: Of `PARTS`, `PROBE` or `TRIAL`.
        devices: For each rank its share of a core.
        schedule: Of pipelines.
        plan: To be tried, as JSON text.
        folder: In which ranks ask for their shares.
    """

    part: str
    devices: tuple[float, ...]
    schedule: str = SCHEDULES[0]
    plan: str = ""
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class WhaleRequest(Size):
    """A measurement of unlike devices.

    Args:
        parts: Of `PARTS`.
        ranks: Numbers of processes, one after the other.
        schedules: Of pipelines.
        factor: How many times as fast the fast ranks are.
        load: Part of all cores that the ranks use together.
        clusters: Of `CLUSTERS`, for `CHOICE`.
        mbit: Speed of the slow link.
    """

    parts: tuple[str, ...] = PARTS
    ranks: tuple[int, ...] = (2, 4)
    schedules: tuple[str, ...] = SCHEDULES
    factor: float = 2.0
    load: float = 0.675
    clusters: tuple[str, ...] = CLUSTERS
    mbit: float = 200.0

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigError: One cannot be; the message names its option.
        """
        check_names("--parts", self.parts, PARTS, "part")
        check_names("--clusters", self.clusters, CLUSTERS, "cluster")
        check_positive({"--mbit": self.mbit})
        check_names("--schedules", self.schedules, SCHEDULES, "schedule")
        check_least(0, self.options(*_MAY_BE_NONE))
        check_least(1, self.options(*({f.name for f in fields(Size)} - set(_MAY_BE_NONE))))
        check_least(_LEAST_SEQUENCE, self.options("sequence"))
        for ranks in self.ranks or (0,):
            check_least(_LEAST_RANKS, {"--ranks": ranks})
            if SHARES in self.parts and ranks % 2:
                reason = "half of the ranks are slow"
                raise ConfigError("--ranks", ranks, reason, "Give even numbers")
            if CUTS in self.parts and self.layers < ranks:
                reason = f"{ranks} stages need as many blocks"
                raise ConfigError("--layers", self.layers, reason, f"Give {ranks} or more")
        if not self.factor >= 1:
            reason = "the fast ranks are not slower than the others"
            raise ConfigError("--factor", self.factor, reason, "Give 1 or more")
        if not 0 < self.load <= 1:
            raise ConfigError("--load", self.load, "it is no part of the cores", "Give up to 1")
        check_heads(self.hidden, self.heads)

    def cluster_jobs(self, cores: int) -> Iterator[tuple[str, WhaleJob]]:
        """Yield the clusters for `CHOICE`, each with a job of its devices.

        Args:
            cores: Of the machine.
        """
        for name in self.clusters:
            half = _CLUSTER_RANKS // 2
            fast = self.factor if name == UNLIKE else 1.0
            devices = device_shares((fast,) * half + (1.0,) * half, self.load * cores)
            yield (
                name,
                WhaleJob(part=CHOICE, ranks=_CLUSTER_RANKS, devices=devices, **self._size()),
            )

    def jobs(self, cores: int) -> Iterator[WhaleJob]:
        """Yield what groups of ranks measure for the other parts, one after the other.

        Args:
            cores: Of the machine.
        """
        for part in self.parts:
            if part == CHOICE:
                continue
            for ranks in self.ranks:
                for speeds in self._speeds(part, ranks):
                    devices = device_shares(speeds, self.load * cores)
                    for schedule in self.schedules if part == CUTS else SCHEDULES[:1]:
                        yield WhaleJob(
                            part=part,
                            ranks=ranks,
                            devices=devices,
                            schedule=schedule,
                            **self._size(),
                        )

    def _size(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Size)}

    def _speeds(self, part: str, ranks: int) -> list[tuple[float, ...]]:
        if part == SHARES:
            half = ranks // 2
            return [(self.factor,) * half + (1.0,) * half]
        others = (self.factor,) * (ranks - 1)
        return [(1.0, *others), (*others, 1.0)]


def device_shares(speeds: Sequence[float], cores: float) -> tuple[float, ...]:
    """Return the share of a core of each rank, in proportion to its speed.

    Args:
        speeds: In any unit.
        cores: That all ranks use together, at most; none of them uses more than 0.9 of one.
    """
    scale = min(_MOST_OF_A_CORE / max(speeds), cores / sum(speeds))
    return tuple(speed * scale for speed in speeds)
