# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks local-steps``, and its systems."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from benchmarks.request import ComputeRequest, NonNegativeInt, Positive
from wavemare.cli.options import check_names
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row

BASELINE = "deepspeed-zero1"
TORCHFT = ("torchft-diloco", "torchft-diloco-streaming")
BOUND = "no-exchange-bound"
"""Replicas that never exchange: the computation of a step. It always runs."""
FRAGMENTS = 4
EACH_STEP = (BASELINE, "ddp", "ddp-powersgd-4", "wavemare-sparse-auto")
"""Systems that exchange in each step."""
OURS = ("wavemare-local-steps", "wavemare-local-steps-streaming")
SYSTEMS = (*EACH_STEP, "post-local-sgd", *TORCHFT, *OURS)
WARMED = ("ddp-powersgd-4", "post-local-sgd", *OURS)
"""Systems that can begin with synchronous steps."""


class LocalStepsRequest(ComputeRequest):
    """Measure replicas with local steps beside ordinary data parallelism.

    A GPT is trained over slow links between emulated hosts. Ratios are to stock DeepSpeed, ZeRO 1.

    For example: python -m benchmarks local-steps --mbit 200 --ranks 2 --json result.json
    """

    measured_by: ClassVar[str] = "benchmarks.local_steps.measure:measure"
    columns: ClassVar[Mapping[str, Column]] = {
        "system": Column("system"),
        "ms": Column("median_s", ".0f", 1000),
        "ratio": Column("ratio", ".2f"),
        "model": Column("model", ".2f"),
        "MB/step": Column("bytes", ".2f", 1e-6),
        "eval loss": Column("eval_loss", ".4f"),
        "gap": Column("loss_gap", "+.2%"),
        "steps to loss": Column("steps_to_loss", ".0f"),
        "s to loss": Column("time_to_loss_s", ".0f"),
    }

    ranks: Annotated[int, Field(ge=2)] = 2
    """Processes."""

    ranks_per_host: PositiveInt = 1
    """Ranks on each host, which form a replica."""

    mbit: Positive = 200.0
    """Speed of each emulated host's link in Mbit/s (needs root)."""

    every: Annotated[int, Field(multiple_of=FRAGMENTS, gt=0)] = 32
    """Steps between exchanges, and in a round. Streaming sends four fragments, and each travels for
    a quarter of them."""

    dense_steps: PositiveInt | None = None
    """Steps in a round of a system that exchanges in each step; by default --every."""

    systems: tuple[str, ...] = SYSTEMS
    """Systems to measure."""

    quality: NonNegativeInt = 0
    """Then train each system for so many steps over links without a limit, and up to twice as many
    until it has the baseline's loss."""

    warmup: NonNegativeInt = 2
    """For the losses: times --every synchronous steps first, of systems that have them."""

    seed: NonNegativeInt = 7
    """Seed of weights and data."""

    hidden: PositiveInt = 384
    heads: PositiveInt = 6
    vocabulary: Annotated[int, Field(ge=256)] = 8192
    sequence: Annotated[int, Field(ge=2)] = 64
    batch: PositiveInt = 1
    rounds: PositiveInt = 3

    def steps(self, name: str) -> int:
        """Return the steps of a system in a round."""
        return (self.dense_steps if name in EACH_STEP else None) or self.every

    def obstacle(self, name: str) -> str | None:
        """Return why a system is not measured, or None."""
        if name in TORCHFT and self.ranks_per_host > 1:
            return "its replicas of several ranks need a torchrun of their own"
        return "torchft is not installed" if name in TORCHFT and not find_spec("torchft") else None

    def check(self) -> None:
        """Check values against each other."""
        super().check()
        check_names("--systems", self.systems, SYSTEMS)
        if self.ranks % self.ranks_per_host or self.ranks == self.ranks_per_host:
            reason = f"{self.ranks} ranks are not two or more hosts of it"
            raise ConfigError("--ranks-per-host", self.ranks_per_host, reason, "Give a divisor")
        if self.quality and self.compute == "sleep":
            reason = "passes that sleep learn nothing"
            raise ConfigError("--quality", self.quality, reason, "Leave out --compute sleep")
        if self.quality and BASELINE not in self.systems:
            reason = f"it counts the steps to the loss of {BASELINE}"
            raise ConfigError("--quality", self.quality, reason, "Name that system too")

    def run(self) -> dict[str, Any]:
        """Run the ranks over links of the speed, then for the losses over links without a limit."""
        from benchmarks.cluster import EmulatedCluster
        from benchmarks.local_steps.measure import add_losses
        from benchmarks.run import run_ranks

        each = self.ranks_per_host
        with EmulatedCluster(self.ranks // each, self.mbit) as cluster:
            result = run_ranks(self, cluster=cluster, ranks_per_host=each)
            if self.quality:
                cluster.shape(None)
                losses = _LossRequest(**self.model_dump())
                found = run_ranks(losses, cluster=cluster, ranks_per_host=each)
                add_losses(self, result, found["curves"])
        return result

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        return (
            f"{self.ranks} ranks over {self.mbit:g} Mbit/s, replicas of {self.ranks_per_host}: "
            f"GPT of {result['parameters'] / 1e6:.1f} M weights, {result['compute_s']:.3f} s "
            f"compute, r = {result['r']:.2f}"
        )

    def case(self, row: Row) -> str:
        """Return the number of ranks."""
        return f"{self.ranks} ranks"


class _LossRequest(LocalStepsRequest):
    measured_by: ClassVar[str] = "benchmarks.local_steps.measure:measure_losses"
