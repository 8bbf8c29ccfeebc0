# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks losses``, and its picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from benchmarks.pipeline.request import BASELINE, SYSTEMS
from benchmarks.request import GptRequest, NonNegativeInt, Positive
from wavemare.cli.options import check_names, option
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row, drawing

SCHEDULES = {
    BASELINE: "1F1B (DeepSpeed)",
    f"{BASELINE}-muon": "1F1B (DeepSpeed)",
    "wavemare-auto-v": "schedule auto",
    "wavemare-auto-v-muon": "schedule auto",
    "wavemare-pipemare": "PipeMare",
    "wavemare-pipemare-muon": "PipeMare, without error feedback",
    "wavemare-pipemare-auto": 'PipeMare, "optimizer_policy": "auto"',
}
"""Systems that can be evaluated, and how the picture calls them."""


class LossesRequest(GptRequest):
    """Train pipelines in real processes on text, in turns; write their losses over time.

    Ratios are of the time of a step, to stock DeepSpeed's 1F1B.

    For example: python -m benchmarks losses --json losses.json --plot losses.svg
    """

    measured_by: ClassVar[str] = "benchmarks.losses.measure:measure"
    on_cpu: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, Column]] = {
        "system": Column("system"),
        "rate": Column("rate", "g"),
        "eval loss": Column("eval_loss", ".4f"),
        "s": Column("seconds", ".1f"),
        "ms/step": Column("median_s", ".1f", 1000),
        "ratio": Column("ratio", ".2f"),
        "s to loss": Column("seconds_to_loss", ".1f"),
        "sooner": Column("sooner", ".2f"),
    }

    stages: Annotated[int, Field(ge=2)] = 2
    """Pipeline ranks, one process each."""

    micro_batches: PositiveInt = 4
    """Micro-batches per optimizer step."""

    systems: tuple[str, ...] = (BASELINE, f"{BASELINE}-muon", "wavemare-pipemare-auto")
    """Systems to train."""

    adamw_lr: Positive = 2e-3
    """Peak learning rate of systems with AdamW."""

    muon_lr: Positive = 4e-3
    """Peak learning rate of systems with Muon."""

    steps_per_round: PositiveInt = 25
    """Optimizer steps of a system in each round, behind which it is evaluated."""

    eval_samples: PositiveInt = 256
    """Samples of an evaluation, whose time does not count."""

    seed: NonNegativeInt = 1234
    """Seed of the order of the data."""

    layers: PositiveInt = 4
    hidden: PositiveInt = 192
    heads: PositiveInt = 6
    vocabulary: Annotated[int, Field(ge=300)] = 4096
    batch: PositiveInt = 4
    rounds: PositiveInt = 10
    warmups: Annotated[int, Field(ge=0, le=0)] = 0
    """None: every step trains."""

    @property
    def num_ranks(self) -> int:
        """One process for each stage."""
        return self.stages

    @property
    def steps(self) -> int:
        """Optimizer steps of each system."""
        return self.rounds * self.steps_per_round

    def rate(self, system: str) -> float:
        """Return a system's peak learning rate."""
        return self.muon_lr if SYSTEMS[system].optimizer == "Muon" else self.adamw_lr

    def check(self) -> None:
        """Check values against each other."""
        super().check()
        check_names("--systems", self.systems, SCHEDULES)
        parts = max(SYSTEMS[name].parts_per_stage for name in self.systems) * self.stages
        if self.layers < parts:
            reason = f"{self.stages} stages of these systems need {parts} blocks"
            raise ConfigError(option("layers"), self.layers, reason, f"Give {parts} or more")

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        return (
            f"{self.stages} stages, {self.micro_batches} micro-batches, {self.steps} steps on "
            f"{result['text']}; seconds to the last loss of {BASELINE}"
        )

    def case(self, row: Row) -> str:
        """Return the sizes of the pipeline."""
        return f"P={self.stages}, M={self.micro_batches}"

    def draw(self, result: Row, file: Path) -> None:
        """Draw the losses over the time of training."""
        with drawing(file, figsize=(8, 4.5)) as axes:
            for row in result["rows"]:
                _, seconds, losses = zip(*row["curve"], strict=True)
                schedule = SCHEDULES[row["system"]]
                label = f"{schedule}, {SYSTEMS[row['system']].optimizer}, rate {row['rate']:g}"
                style = "-" if SYSTEMS[row["system"]].steady else "--"
                axes.plot(seconds, losses, style, marker="o", ms=3, label=label)
            axes.axhline(result["bigram"], color="grey", lw=0.8, label="bigrams")
            axes.set(xlabel="seconds of training", ylabel="validation loss (nats per token)")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
