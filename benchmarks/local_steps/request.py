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
PIPELINE_BASELINE = "deepspeed-1f1b"
"""That of replicas that are pipelines: stock DeepSpeed sums their gradients in each step."""
ACROSS = "deepspeed-1f1b-across"
"""The same, where each pipeline crosses the links: DeepSpeed's own placement of stages."""
TORCHFT = ("torchft-diloco", "torchft-diloco-streaming")
BOUND = "no-exchange-bound"
"""Replicas that never exchange: the computation of a step. It always runs."""
FRAGMENTS = 4
OURS = ("wavemare-local-steps", "wavemare-local-steps-streaming")
_DENSE = (BASELINE, "ddp", "ddp-powersgd-4", "wavemare-sparse-auto")
SYSTEMS = (*_DENSE, "post-local-sgd", *TORCHFT, *OURS)
"""Without --stages."""
PIPELINES = (PIPELINE_BASELINE, ACROSS, *OURS)
"""With --stages."""
EACH_STEP = (*_DENSE, PIPELINE_BASELINE, ACROSS)
"""Systems that exchange in each step."""
WARMED = ("ddp-powersgd-4", "post-local-sgd", *OURS)
"""Systems that can begin with synchronous steps."""


class LocalStepsRequest(ComputeRequest):
    """Measure replicas with local steps beside ordinary data parallelism.

    A GPT is trained over slow links between emulated hosts. Ratios are to stock DeepSpeed: ZeRO 1,
    or with --stages its pipelines.

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

    stages: PositiveInt = 1
    """Pipeline stages of a replica, one on each rank of a host, by the schedule 1F1B."""

    micro_batches: PositiveInt | None = None
    """With --stages: micro-batches of a step; by default twice as many as stages."""

    mbit: Positive = 200.0
    """Speed of each emulated host's link in Mbit/s (needs root)."""

    every: Annotated[int, Field(multiple_of=FRAGMENTS, gt=0)] = 32
    """Steps between exchanges, and in a round. Streaming sends four fragments, and each travels for
    a quarter of them."""

    dense_steps: PositiveInt | None = None
    """Steps in a round of a system that exchanges in each step; by default --every."""

    systems: tuple[str, ...] | None = None
    """Systems to measure; all that there are with or without --stages if omitted."""

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

    @property
    def known(self) -> tuple[str, ...]:
        """The systems that there are."""
        return PIPELINES if self.stages > 1 else SYSTEMS

    @property
    def chosen(self) -> tuple[str, ...]:
        """The systems to measure."""
        return self.known if self.systems is None else self.systems

    @property
    def baseline(self) -> str:
        """The system to which ratios are."""
        return PIPELINE_BASELINE if self.stages > 1 else BASELINE

    @property
    def step_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.micro_batches or (2 * self.stages if self.stages > 1 else 1)

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
        check_names("--systems", self.chosen, dict.fromkeys((*SYSTEMS, *PIPELINES)))
        if self.ranks % self.ranks_per_host or self.ranks == self.ranks_per_host:
            reason = f"{self.ranks} ranks are not two or more hosts of it"
            raise ConfigError("--ranks-per-host", self.ranks_per_host, reason, "Give a divisor")
        self._check_stages()
        if self.quality and self.compute == "sleep":
            reason = "passes that sleep learn nothing"
            raise ConfigError("--quality", self.quality, reason, "Leave out --compute sleep")
        if self.quality and BASELINE not in self.chosen:
            reason = f"it counts the steps to the loss of {BASELINE}"
            raise ConfigError("--quality", self.quality, reason, "Name that system too")

    def _check_stages(self) -> None:
        staged = self.stages > 1
        for name in self.chosen:
            if name not in self.known:
                reason = "it has no pipelines" if staged else "it is a pipeline"
                change = "leave out --stages" if staged else "add --stages"
                remedy = f"Name some of {', '.join(self.known)}, or {change}"
                raise ConfigError("--systems", name, reason, remedy)
        if staged and self.stages != self.ranks_per_host:
            reason = (
                f"the pipeline of a host has a stage on each of its {self.ranks_per_host} ranks"
            )
            remedy = "Give the same number to --ranks-per-host"
            raise ConfigError("--stages", self.stages, reason, remedy)
        if staged and self.stages > self.layers:
            reason = f"they need {self.stages} blocks or more"
            raise ConfigError("--layers", self.layers, reason, "Give more")
        if staged and self.quality:
            reason = "stages have unlike weights, of which the benchmark makes no mean"
            raise ConfigError("--quality", self.quality, reason, "Leave out --stages")
        if not staged and self.micro_batches:
            reason = "only a pipeline cuts a step into them"
            raise ConfigError("--micro-batches", self.micro_batches, reason, "Add --stages")

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
        staged = f" stages, {self.step_micro_batches} micro-batches" if self.stages > 1 else ""
        return (
            f"{self.ranks} ranks over {self.mbit:g} Mbit/s, replicas of "
            f"{self.ranks_per_host}{staged}: "
            f"GPT of {result['parameters'] / 1e6:.1f} M weights, {result['compute_s']:.3f} s "
            f"compute, r = {result['r']:.2f}"
        )

    def case(self, row: Row) -> str:
        """Return the number of ranks."""
        return f"{self.ranks} ranks"


class _LossRequest(LocalStepsRequest):
    measured_by: ClassVar[str] = "benchmarks.local_steps.measure:measure_losses"
