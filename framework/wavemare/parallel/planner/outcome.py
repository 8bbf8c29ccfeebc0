# SPDX-License-Identifier: Apache-2.0
"""What a search found: some plans, best first, and the one with equal parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from wavemare.parallel.plan import ParallelPlan
from wavemare.parallel.planner.cluster import Cluster
from wavemare.parallel.planner.costs import ModelCosts

__all__ = ["PlanSearch"]

_GIB = 2**30
_HEADER = ("plan", "P", "T", "D", "steps", "shares", "ZeRO", "other", "tokens/s", "gain", "GiB")


@dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """Plans by predicted tokens per second.

    Args:
        plans: The best ones, none of which is slower than `equal`.
        equal: The best plan with devices as they come, equal shares and cuts into equal work; None
            where none fits into memory.
        costs: Of the model.
        cluster: The devices.
    """

    plans: tuple[ParallelPlan, ...]
    equal: ParallelPlan | None
    costs: ModelCosts
    cluster: Cluster

    @property
    def best(self) -> ParallelPlan:
        """The plan with the most predicted tokens per second."""
        return self.plans[0]

    @property
    def gain(self) -> float | None:
        """How many times as fast as the equal plan the best one is predicted to be."""
        return None if self.equal is None else _speed(self.best) / _speed(self.equal)

    def to_json(self) -> str:
        """Return the plans, the equal one and the cluster as JSON text."""
        values: dict[str, Any] = {
            "plans": [json.loads(plan.to_json()) for plan in self.plans],
            "equal": None if self.equal is None else json.loads(self.equal.to_json()),
            "cluster": json.loads(self.cluster.to_json()),
        }
        return json.dumps(values, indent=2) + "\n"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEADER]
        rows += [self._row(str(place), plan) for place, plan in enumerate(self.plans, 1)]
        if self.equal is not None:
            rows.append(self._row("equal", self.equal))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if self.equal is None:
            lines.append("equal parts do not fit into the devices' memory")
        types = self.cluster.types
        devices = ", ".join(
            f"{sum(d.type == name for d in self.cluster.devices)}x{name}" for name in types
        )
        title = f"{self.costs.name}, {self.costs.parameters / 1e6:.1f} M parameters, on {devices}"
        return "\n".join([title, *lines, "", str(self.best)])

    def _row(self, name: str, plan: ParallelPlan) -> tuple[str, ...]:
        predicted = plan.predicted
        assert predicted is not None, "plans of a search have predictions"
        marks = ["recompute"] * plan.recompute + ["waves"] * plan.wavelet
        marks += [plan.schedule] * (plan.schedule != "1f1b")
        gain = "" if self.equal is None else f"{_speed(plan) / _speed(self.equal):.3f}"
        return (
            name,
            str(plan.stages),
            str(plan.tensor_parallel),
            str(plan.data_parallel),
            str(plan.micro_steps),
            "/".join(map(str, sorted(set(plan.shares), reverse=True))),
            str(plan.zero_stage),
            " ".join(marks) or "-",
            f"{predicted.tokens_per_s:,.0f}",
            gain,
            f"{max(predicted.memory_bytes) / _GIB:.2f}",
        )


def _speed(plan: ParallelPlan) -> float:
    assert plan.predicted is not None, "plans of a search have predictions"
    return plan.predicted.tokens_per_s
