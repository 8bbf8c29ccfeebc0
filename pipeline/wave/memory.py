# SPDX-License-Identifier: Apache-2.0
"""Memory of plans of waves between forward and backward passes.

With ``a_l`` the bytes that segment ``l`` of the ``L`` below the head keeps, ``P(k)`` the sum of the
first ``k`` of them and ``A = P(L)``, tick-tock keeps ``P(L - j) + P(i)`` after ``j`` backward
passes of one wave and ``i`` forward passes of the other. Weights, gradients and optimizer states
come on top, and are the same for every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wavemare.errors import PlanError
from wavemare.pipeline.plan.action import Kind
from wavemare.pipeline.plan.plan import Plan

__all__ = [
    "Live",
    "accumulation_peak",
    "in_phase_peak",
    "live_bytes",
    "paired_share",
    "peak",
]


class Live(NamedTuple):
    """Bytes kept for backward passes.

    Args:
        tick: By micro-batches of wave 0.
        tock: By micro-batches of wave 1.
    """

    tick: int = 0
    tock: int = 0

    @property
    def total(self) -> int:
        """Of both waves."""
        return self.tick + self.tock


def live_bytes(plan: Plan, saved_bytes: Sequence[int]) -> list[Live]:
    """Return the bytes kept after each action of a plan.

    Args:
        plan: On one rank.
        saved_bytes: For each segment, the head last, what its forward pass keeps for its backward
            pass.

    Raises:
        PlanError: There are numbers for another number of segments, or the plan has several ranks.
    """
    if not plan.on_one_rank:
        reason = f"it has {len(plan.ranks)} ranks"
        raise PlanError("plan", plan.schedule, reason, "Give a plan of waves, which is for one")
    if len(saved_bytes) != plan.num_stages:
        reason = f"these are {len(saved_bytes)} numbers for {plan.num_stages} segments"
        raise PlanError("saved_bytes", tuple(saved_bytes), reason, "Give one for each segment")
    sign = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
    kept = [0, 0]
    curve = []
    for kind, stage, _, _, wave in plan.ranks[0]:
        kept[wave] += sign.get(kind, 0) * saved_bytes[stage]
        curve.append(Live(*kept))
    return curve


def peak(plan: Plan, saved_bytes: Sequence[int]) -> int:
    """Return the most that is kept at any time.

    Raises:
        PlanError: See `live_bytes`.
    """
    return max((live.total for live in live_bytes(plan, saved_bytes)), default=0)


def paired_share(plan: Plan) -> float:
    """Return which share of forward passes come before the backward passes before them are done.

    Those of each step's first micro-batch and of the head, which have none to go beside, do not
    count. Without pacing the pair at the bottom has its forward pass last: ``(L - 1) / L``.

    Args:
        plan: On one rank.

    Returns:
        0 to 1; 0 where no forward pass could be paired.
    """
    head = plan.num_stages - 1
    done = 0
    paired = possible = 0
    for kind, stage, micro_batch, *_ in plan.ranks[0]:
        if kind is Kind.BACKWARD and stage == 0:
            done = micro_batch + 1
        elif kind is Kind.FORWARD and stage < head and micro_batch % plan.micro_batches:
            possible += 1
            paired += done < micro_batch
    return paired / possible if possible else 0.0


def accumulation_peak(saved_bytes: Sequence[int]) -> int:
    """Return the peak of one wave, or of waves one after the other: ``A``.

    Args:
        saved_bytes: Of each segment below the head; the head keeps nothing beyond its own passes.
    """
    return sum(saved_bytes)


def in_phase_peak(saved_bytes: Sequence[int]) -> int:
    """Return the peak of two waves that go forward together: ``2A``."""
    return 2 * sum(saved_bytes)
