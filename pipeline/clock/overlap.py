# SPDX-License-Identifier: Apache-2.0
"""A rank with two resources: one computes, the other runs collectives beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import Action, Kind

__all__ = ["overlap"]

_COLLECTIVE_AFTER = {Kind.FORWARD: Kind.SUM_OUTPUT, Kind.BACKWARD: Kind.SUM_GRADIENT}


def overlap(
    actions: Iterable[Action], duration: Callable[[Kind, int], float], contention: float = 0.0
) -> tuple[Event, ...]:
    """Run a plan of one rank on the clock, with the collectives that follow its passes.

    Collectives run one after the other, in the order of the passes after which they start. The
    next pass of the same micro-batch waits for its last one, and the reduction of the gradients
    for all.

    Args:
        actions: In their order.
        duration: Seconds of an action, or of a segment's collective, by kind and segment. What
            takes no time is no collective.
        contention: How much longer a pass takes while a collective runs: 0.08 for 8 %.

    Returns:
        Actions and collectives in the order in which they begin.
    """
    events: list[Event] = []
    ends: dict[int, float] = {}  # by micro-batch, of the collective for which its next pass waits
    clock = free_s = 0.0
    for action in actions:
        kind, stage, micro_batch, version, wave = action
        if kind is Kind.REDUCE:
            clock = max(clock, free_s)
        elif kind in _COLLECTIVE_AFTER:
            clock = max(clock, ends.get(micro_batch, 0.0))
        start_s = clock
        clock += _stretched(duration(kind, stage), free_s - clock, contention)
        events.append(Event(action, start_s, clock))
        collective = _COLLECTIVE_AFTER.get(kind)
        if collective is not None and (length_s := duration(collective, stage)):
            begin_s, free_s = max(clock, free_s), max(clock, free_s) + length_s
            ends[micro_batch] = free_s
            sums = Action(collective, stage, micro_batch, version, wave)
            events.append(Event(sums, begin_s, free_s))
    return tuple(sorted(events, key=lambda event: event.start_s))


def _stretched(length_s: float, beside_s: float, contention: float) -> float:
    """Return how long an action takes if collectives run beside its first seconds.

    None starts while it runs, as they start at the ends of passes.
    """
    slow_s = min(max(beside_s, 0.0), length_s * (1 + contention))
    return slow_s + length_s - slow_s / (1 + contention)
