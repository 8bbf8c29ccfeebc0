# SPDX-License-Identifier: Apache-2.0
"""Pipelines of many stages, from the messages of a short one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from wavemare.bench.scaling.point import Point
from wavemare.errors import DataError
from wavemare.pipeline.action import Kind
from wavemare.pipeline.schedules import one_f_one_b, pipemare
from wavemare.pipeline.simulate import Costs, simulate

__all__ = ["SYSTEMS", "StageCosts", "calibrate", "measured", "predict", "step_s"]

SYSTEMS = ("deepspeed-1f1b", "wavemare-pipemare")
"""Both with as many micro-batches per optimizer step as there are stages."""

_FORWARD = 0.35
"""Share of a micro-batch's time that is its forward pass, as of ``bench pipeline --synthetic``."""
_PRECISION_S = 1e-7


@dataclass(frozen=True)
class StageCosts:
    """What every stage takes.

    Args:
        compute_s: Both passes of a micro-batch.
        step_s: An optimizer step.
        message_s: From the start of a message to its arrival.
    """

    compute_s: float
    step_s: float
    message_s: float

    def to_costs(self) -> Costs:
        """Return them as the simulator takes them."""
        return Costs(
            forward_s=_FORWARD * self.compute_s,
            backward_s=(1 - _FORWARD) * self.compute_s,
            step_s=self.step_s,
            send_s=self.message_s,
        )


def measured(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return the rows of results of ``bench pipeline`` with as many micro-batches as stages.

    Args:
        results: Contents of their files.

    Returns:
        By system and number of stages.
    """
    rows: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in SYSTEMS}
    for result in results:
        for row in result["rows"]:
            if row["system"] in rows and row["stages"] == row["micro_batches"]:
                rows[row["system"]][row["stages"]] = row
    return {name: dict(sorted(found.items())) for name, found in rows.items()}


def calibrate(system: str, row: Mapping[str, Any]) -> StageCosts:
    """Return the costs with which the simulated step takes as long as the measured one.

    Passes and steps are those of the row; what a message takes is what is left, so that it also
    stands for the interpreter's work between them.

    Args:
        system: Of `SYSTEMS`.
        row: Of the shortest pipeline.

    Raises:
        DataError: The step is shorter than its passes.
    """
    ranks = row["ranks"]
    compute_s = mean(rank["compute_s"] for rank in ranks) / row["micro_batches"]
    optimizer_s = mean(rank["step_s"] for rank in ranks)
    low, high = 0.0, float(row["median_s"])

    def seconds(message_s: float) -> float:
        return step_s(system, row["stages"], StageCosts(compute_s, optimizer_s, message_s))

    if seconds(low) > row["median_s"]:
        reason = f"{system} took less than its own passes one after another"
        raise DataError("median_s", row["median_s"], reason, "Measure again with more rounds")
    while high - low > _PRECISION_S:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < row["median_s"] else (low, middle)
    return StageCosts(compute_s, optimizer_s, low)


def step_s(system: str, stages: int, costs: StageCosts) -> float:
    """Return the seconds of an optimizer step of as many micro-batches as stages, simulated.

    Of PipeMare it is the period of the steady state.
    """
    if system == "deepspeed-1f1b":
        return simulate(one_f_one_b(stages, stages), costs.to_costs()).makespan_s
    timeline = simulate(pipemare(stages, stages, 4), costs.to_costs())
    ends = [event.end_s for event in timeline.ranks[0] if event.action.kind is Kind.STEP]
    return ends[2] - ends[1]


def predict(
    system: str, counts: Sequence[int], costs: StageCosts, most_simulated: int = 64
) -> list[Point]:
    """Return the seconds of a step for each number of stages.

    Steps grow in a straight line with the stages once there are some: (2P - 1) passes of 1F1B and P
    of PipeMare, and as many messages. So more than `most_simulated` stages are not simulated: they
    follow the line through this number and its half.
    """
    half = most_simulated // 2
    ends: dict[int, float] = {}
    if max(counts) > most_simulated:
        ends = {stages: step_s(system, stages, costs) for stages in (half, most_simulated)}
    points = []
    for stages in counts:
        if stages <= most_simulated:
            seconds = step_s(system, stages, costs)
        else:
            slope = (ends[most_simulated] - ends[half]) / half
            seconds = ends[most_simulated] + slope * (stages - most_simulated)
        points.append(Point(system, stages, seconds))
    return points
