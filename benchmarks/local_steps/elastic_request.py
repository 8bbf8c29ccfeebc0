# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks elastic``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from benchmarks.request import Positive, Request
from wavemare.cli.options import check_names
from wavemare.errors import ConfigError
from wavemare.extras import require
from wavemare.observe.tables import Column, Row

BASELINE = "fixed"
"""Replicas that are ranks of one job."""
CALM = (BASELINE, "elastic", "torchft")
"""Systems that nobody kills."""
KILLED = ("elastic-killed", "torchft-killed", "restarts-killed")
"""Systems of which a replica is killed from time to time: replicas that come and go, torchft's own
DiLoCo, and ranks of one job that start again together from the checkpoint of the last exchange."""


class ElasticRequest(Request):
    """Measure replicas that come and go while one after the other is killed.

    Training steps sleep, so that the processes that start again take no core from the others.
    Ratios are to replicas of one job that nobody kills.

    For example: python -m benchmarks elastic --steps 1216 --kill-every 60 --json result.json
    """

    measured_by: ClassVar[str] = "benchmarks.local_steps.elastic_replica:main"
    columns: ClassVar[Mapping[str, Column]] = {
        "system": Column("system"),
        "ms": Column("median_s", ".1f", 1000),
        "ratio": Column("ratio", ".3f"),
        "of its undisturbed steps": Column("progress", ".1%"),
        "of all replicas' steps": Column("goodput", ".1%"),
        "kills": Column("kills", ".0f"),
        "s to the next step": Column("back_s", ".1f"),
        "exchanges lost": Column("missed", ".0f"),
    }

    replicas: Annotated[int, Field(ge=2)] = 4
    """Replicas, each of one process on this machine."""

    steps: PositiveInt = 1216
    """Optimizer steps of a system that is killed."""

    calm_steps: PositiveInt = 320
    """Optimizer steps of a system that is not killed, in each round."""

    step_ms: Positive = 200.0
    """How long the computation of a step sleeps, in milliseconds."""

    every: PositiveInt = 32
    """Steps between exchanges."""

    weights: PositiveInt = 1_000_000
    """Numbers of the model."""

    kill_every: Positive = 60.0
    """Seconds between kills. The replicas take turns."""

    systems: tuple[str, ...] = (BASELINE, "elastic", "elastic-killed", "restarts-killed")
    """Systems to measure."""

    rounds: PositiveInt = 1

    @property
    def num_ranks(self) -> int:
        """A process of each replica."""
        return self.replicas

    def check(self) -> None:
        """Check that the systems are known and that exchanges end the runs."""
        super().check()
        check_names("--systems", self.systems, (*CALM, *KILLED))
        for name in ("steps", "calm_steps"):
            if (value := getattr(self, name)) % self.every:
                reason = "the last step makes no exchange"
                remedy = f"Give a multiple of --every {self.every}"
                raise ConfigError(f"--{name.replace('_', '-')}", value, reason, remedy)
        if any(name.startswith(("elastic", "torchft")) for name in self.systems):
            require("torchft", "--systems")

    def run(self) -> dict[str, Any]:
        """Run one system after the other."""
        from benchmarks.local_steps.elastic_measure import measure

        return measure(self)

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        return (
            f"{self.replicas} replicas of {result['parameters'] / 1e6:.1f} M weights, steps of "
            f"{self.step_ms:g} ms, an exchange every {self.every}, a kill every "
            f"{self.kill_every:g} s"
        )

    def case(self, row: Row) -> str:
        """Return the number of replicas."""
        return f"{self.replicas} replicas"

    def remarks(self, result: Row) -> Iterator[str]:
        """Yield nothing: no system is left out."""
        yield from ()
