# SPDX-License-Identifier: Apache-2.0
"""Predicts step times of waves, and decides whether to use them.

The model has one resource that computes and one that runs collectives (see `overlap`). For equal
segments of forward time ``f``, backward time ``2f`` and ``c`` for a collective in each direction,
accumulation takes ``3f + 2c`` per segment and paired tick-tock ``2f + max(f, c)``, or ``2c`` where
that is more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import Costs, Seconds, simulate
from wavemare.pipeline.plan.plan import Kind, Plan
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

LEAST_GAIN = 1.03
"""The least predicted speed-up of tick-tock over accumulation."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of one optimizer step under each schedule.

    Args:
        accumulation: One micro-batch after the other.
        in_phase: Micro-batches in pairs; memory of two.
        domino: Halves of each micro-batch in pairs.
        tick_tock: Two waves half a cycle apart.
    """

    accumulation: float
    in_phase: float
    domino: float
    tick_tock: float

    @property
    def gain(self) -> float:
        """Speed-up of tick-tock over accumulation."""
        return self.accumulation / self.tick_tock if self.tick_tock else 1.0


class Decision(NamedTuple):
    """Whether to use tick-tock.

    Args:
        on: Whether.
        reason: For a log line, without a trailing full stop.
    """

    on: bool
    reason: str


def sums_of(costs: Costs, num_segments: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return ``sums_output`` and ``sums_gradient``: which segments' collectives take time."""
    output_s = costs.of("sum_output_s", num_segments)
    gradient_s = costs.of("sum_gradient_s", num_segments)
    return tuple(cost > 0 for cost in output_s), tuple(cost > 0 for cost in gradient_s)


def costs_of_segments(seconds: Mapping[tuple[Kind, int], float]) -> tuple[Costs, int]:
    """Return what a model's segments cost, and how many there are, with the head.

    The collectives of a backward pass divide it into segments. A forward pass has a collective
    after each of these but the head, as long as it has any; what it does later counts for the head,
    since no other pass runs meanwhile.

    Args:
        seconds: Of the parts of passes between two collectives, and of these, by kind and place.
    """

    def row(kind: Kind) -> list[float]:
        return [seconds[place] for place in sorted(seconds) if place[0] is kind]

    forward, backward = row(Kind.FORWARD), row(Kind.BACKWARD)
    sums, sums_back = row(Kind.SUM_OUTPUT), row(Kind.SUM_GRADIENT)
    shared = min(len(forward), len(backward)) - 1
    between = [0.0] * (len(backward) - 1 - shared)
    costs = Costs(
        forward_s=(*forward[:shared], *between, sum(forward[shared:]) + sum(sums[shared:])),
        backward_s=tuple(reversed(backward)),
        sum_output_s=(*sums[:shared], *between, 0.0),
        sum_gradient_s=(0.0, *reversed(sums_back)),
    )
    return costs, len(backward)


def predict(
    costs: Costs,
    num_segments: int,
    micro_batches: int,
    *,
    split_loss: float = 0.0,
) -> Prediction:
    """Return how long an optimizer step of each schedule takes.

    Args:
        costs: Of each segment, with its collectives; what takes no time is no collective.
        num_segments: With the head.
        micro_batches: Per optimizer step.
        split_loss: How much longer two halves of a micro-batch take than the whole, in passes: 0.1
            for 10 %.

    Raises:
        PlanError: See `tick_tock` and `Costs`.
    """
    up, down = sums_of(costs, num_segments)

    def paired(count: int) -> Plan:
        return in_phase(num_segments, count, sums_output=up, sums_gradient=down)

    waves = tick_tock(num_segments, micro_batches, sums_output=up, sums_gradient=down)
    return Prediction(
        accumulation=step_time(accumulation(num_segments, micro_batches), costs),
        in_phase=step_time(paired(micro_batches), costs),
        domino=step_time(paired(2 * micro_batches), _halved(costs, split_loss)),
        tick_tock=step_time(waves, costs),
    )


def step_time(plan: Plan, costs: Costs) -> float:
    """Return the mean seconds of a plan's optimizer steps.

    Raises:
        PlanError: See `simulate`; or the plan has no optimizer step.
    """
    if plan.num_steps < 1:
        raise PlanError("steps", plan.num_steps, "there is none to be timed", "Give 1 or more")
    return simulate(plan, costs).makespan_s / plan.num_steps


def decide(prediction: Prediction) -> Decision:
    """Decide whether to use tick-tock, for mode ``auto``."""
    if prediction.gain > LEAST_GAIN:
        return Decision(True, f"a step is predicted {prediction.gain:.3f} times as fast")
    reason = f"a step would be {prediction.gain:.3f} times as fast, not above {LEAST_GAIN}"
    return Decision(False, reason)


def _halved(costs: Costs, split_loss: float) -> Costs:
    """Return the costs of half a micro-batch."""

    def part(seconds: Seconds, factor: float) -> Seconds:
        if isinstance(seconds, tuple):
            return tuple(number * factor for number in seconds)
        return seconds * factor

    return replace(
        costs,
        forward_s=part(costs.forward_s, (1 + split_loss) / 2),
        backward_s=part(costs.backward_s, (1 + split_loss) / 2),
        sum_output_s=part(costs.sum_output_s, 0.5),
        sum_gradient_s=part(costs.sum_gradient_s, 0.5),
    )
