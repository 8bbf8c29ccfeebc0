# SPDX-License-Identifier: Apache-2.0
"""What a check has found out about a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wavemare.pipeline.plan.action import Kind

__all__ = ["Report"]

_MESSAGES = {
    Kind.SEND_ACTIVATION: "activations",
    Kind.SEND_GRAD: "gradients",
    Kind.SEND_NORM: "norms",
    Kind.SEND_TOTAL: "total norms",
}


@dataclass(frozen=True)
class Report:
    """Properties of a plan that has passed its check.

    A tick is the time of one forward or backward pass; everything else takes none.

    Args:
        schedule: The plan's schedule.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        num_steps: Optimizer steps.
        actions: For each rank the number of its actions.
        peak_activations: For each stage the most micro-batches whose forward pass was done and
            whose backward pass was not; 0 where there are no backward passes.
        staleness: For each stage and, in their order, each micro-batch: the optimizer steps of the
            stage between the micro-batch's forward and backward pass. Empty without backward
            passes.
        ticks: Length of the whole plan.
        idle_ticks: For each rank the ticks in which it does no pass.
        steady_ticks: Length of the steady state: from the tick at which the last rank begins its
            first backward pass (forward pass where there is none) to that at which the first rank
            has ended its last forward pass; 0 for a plan too short to have one.
        steady_idle_ticks: For each rank its idle ticks in the steady state.
        messages: How many messages of each kind are sent.
    """

    schedule: str
    num_stages: int
    micro_batches: int
    num_steps: int
    actions: tuple[int, ...]
    peak_activations: tuple[int, ...]
    staleness: tuple[tuple[int, ...], ...]
    ticks: int
    idle_ticks: tuple[int, ...]
    steady_ticks: int
    steady_idle_ticks: tuple[int, ...]
    messages: Mapping[Kind, int] = field(hash=False)

    @property
    def max_staleness(self) -> tuple[int, ...]:
        """For each stage the highest staleness of a micro-batch.

        It is also how many older versions of its weights an exact correction keeps.
        """
        return tuple(max(stage, default=0) for stage in self.staleness)

    @property
    def mean_staleness(self) -> tuple[float, ...]:
        """For each stage the mean staleness of the run's micro-batches."""
        return tuple(sum(stage) / len(stage) if stage else 0.0 for stage in self.staleness)

    @property
    def bubble(self) -> float:
        """Idle ticks over all ticks of all ranks, 0 to 1."""
        return sum(self.idle_ticks) / (self.ticks * len(self.idle_ticks)) if self.ticks else 0.0

    @property
    def steady_bubble(self) -> float | None:
        """The same for the steady state; None where there is none."""
        if not self.steady_ticks:
            return None
        return sum(self.steady_idle_ticks) / (self.steady_ticks * len(self.steady_idle_ticks))

    def __str__(self) -> str:
        steady = self.steady_bubble
        sent = [f"{self.messages.get(kind, 0)} {name}" for kind, name in _MESSAGES.items()]
        lines = [
            f"{self.schedule}: stages {self.num_stages}, micro-batches per step "
            f"{self.micro_batches}, optimizer steps {self.num_steps}",
            f"length: {self.ticks} ticks of one pass each",
            f"bubble: {self.bubble:.1%} of all ticks, in steady state "
            + (f"{steady:.1%} (of {self.steady_ticks} ticks)" if steady is not None else "none"),
            f"messages: {', '.join(sent)}",
            "",
        ]
        return "\n".join(lines + _table(self)) + "\n"


def _table(report: Report) -> list[str]:
    """Return a line for each stage and for each rank: the same lines where these are the same."""
    ranks = [("rank", "actions", "idle ticks")]
    ranks += [
        (str(rank), str(actions), str(idle))
        for rank, (actions, idle) in enumerate(zip(report.actions, report.idle_ticks, strict=True))
    ]
    stages = [("stage", "peak activations", "max staleness", "mean")]
    stages += [
        (str(stage), str(peak), str(highest), f"{mean:.3f}")
        for stage, (peak, highest, mean) in enumerate(
            zip(report.peak_activations, report.max_staleness, report.mean_staleness, strict=True)
        )
    ]
    if len(ranks) == len(stages):
        return _aligned([stage + rank[1:] for stage, rank in zip(stages, ranks, strict=True)])
    return [*_aligned(stages), "", *_aligned(ranks)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
