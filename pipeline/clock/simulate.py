# SPDX-License-Identifier: Apache-2.0
"""When each action of a plan ran: measured in a run, or simulated from what it costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import NamedTuple

from wavemare.errors import PlanError, check_number
from wavemare.pipeline.clock.clock import execute
from wavemare.pipeline.plan.plan import (
    COLLECTIVES,
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Message,
    Plan,
    message_of,
)

_BUSY = COMPUTE | {Kind.STEP}


class Event(NamedTuple):
    """An action and when it ran.

    Args:
        action: What was done.
        start_s: Seconds since the timeline's beginning.
        end_s: The same.
    """

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The events of every rank, in the order in which they began.

    Args:
        title: What is shown: a schedule's name, "simulated" or "measured".
        ranks: For each rank its events. A rank is idle, or waits for a message, in between; a
            receive's event ends when the message is there and may begin long before.
    """

    title: str
    ranks: tuple[tuple[Event, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first event to the end of the last."""
        starts = [events[0].start_s for events in self.ranks if events]
        ends = [max(event.end_s for event in events) for events in self.ranks if events]
        return max(ends) - min(starts) if ends else 0.0

    @property
    def collectives_s(self) -> float:
        """Seconds of all ranks' collectives."""
        events = (event for rank in self.ranks for event in rank)
        return sum(e.end_s - e.start_s for e in events if e.action.kind in COLLECTIVES)

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank computed: forward and backward passes and optimizer steps."""
        return sum(e.end_s - e.start_s for e in self.ranks[rank] if e.action.kind in _BUSY)


def utilisation(timeline: Timeline) -> tuple[float, ...]:
    """Return for each rank the share of the whole time in which it computes, 0 to 1."""
    whole = timeline.makespan_s
    ranks = range(len(timeline.ranks))
    return tuple(timeline.busy_s(rank) / whole if whole else 0.0 for rank in ranks)


def bubble(timeline: Timeline) -> float:
    """Return the share of all ranks' time in which nothing is computed, 0 to 1."""
    shares = utilisation(timeline)
    return 1 - sum(shares) / len(shares) if shares else 0.0


Seconds = float | tuple[float, ...]
"""The same for all stages, or one for each."""

_COST_OF = {
    Kind.FORWARD: "forward_s",
    Kind.BACKWARD: "backward_s",
    Kind.BACKWARD_WEIGHT: "weight_s",
    Kind.STEP: "step_s",
    Kind.SUM_OUTPUT: "sum_output_s",
    Kind.SUM_GRADIENT: "sum_gradient_s",
}
_COLLECTIVE_AFTER = {Kind.FORWARD: Kind.SUM_OUTPUT, Kind.BACKWARD: Kind.SUM_GRADIENT}
_OF_SEGMENTS = ("sum_output_s", "sum_gradient_s")


@dataclass(frozen=True)
class Costs:
    """What a plan's actions cost, in seconds: one number for all stages, or one for each.

    Args:
        forward_s: A forward pass of one micro-batch.
        backward_s: A whole backward pass of one micro-batch.
        weight_s: The part of it that computes the gradients of the weights, where it is split.
        step_s: An optimizer step.
        send_s: From a message's start to its arrival, by the sending stage. Messages that are
            under way at the same time do not slow each other down.
        sum_output_s: The sum over ranks of a segment's output, which runs beside later passes; 0
            where there is none. Like the next one for plans on one rank only.
        sum_gradient_s: The same of the gradient of its input.

    Raises:
        PlanError: A cost is not a finite number of at least 0.
    """

    forward_s: Seconds
    backward_s: Seconds
    step_s: Seconds = 0.0
    send_s: Seconds = 0.0
    sum_output_s: Seconds = 0.0
    sum_gradient_s: Seconds = 0.0
    weight_s: Seconds = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for cost in value if isinstance(value, tuple) else (value,):
                check_number(PlanError, field.name, cost)

    def of(self, name: str, num_stages: int) -> tuple[float, ...]:
        """Return one cost for each stage.

        Raises:
            PlanError: There are costs for another number of stages.
        """
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * num_stages
        if len(value) != num_stages:
            reason = f"these are {len(value)} costs for {num_stages} stages"
            raise PlanError(name, value, reason, "Give one for all stages, or one for each")
        return value

    def durations(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """Return what each kind of action takes on each stage; kinds that are left out take none.

        Raises:
            PlanError: There are costs for another number of stages, or a part is longer than its
                whole.
        """
        result = {kind: self.of(name, num_stages) for kind, name in _COST_OF.items()}
        whole, part = result[Kind.BACKWARD], result[Kind.BACKWARD_WEIGHT]
        rest = tuple(a - b for a, b in zip(whole, part, strict=True))
        if min(rest) < 0:
            reason = "it is a part of backward_s, and longer"
            raise PlanError("weight_s", self.weight_s, reason, "Give a shorter time")
        return result | {Kind.BACKWARD_INPUT: rest}


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Run a plan on the clock.

    Each rank does its actions in their order. A send takes its rank no time unless all of
    `Plan.send_slots` are in use. Loading, reductions and corrections take no time. Sums over ranks
    are events of the one rank that they belong to, beside those of its passes (see `_overlap`).

    Args:
        plan: What the ranks do; checked or not.
        costs: What it costs.

    Raises:
        PlanError: The costs are for another number of stages, or for one rank and the plan has
            several, or the plan never ends.
    """
    by_stage = {field.name: costs.of(field.name, plan.num_stages) for field in fields(costs)}

    durations = costs.durations(plan.num_stages)

    def duration(kind: Kind, stage: int) -> float:
        return durations[kind][stage] if kind in durations else 0.0

    title = f"{plan.schedule}, simulated"
    for name in _OF_SEGMENTS:
        if any(by_stage[name]) and len(plan.ranks) > 1:
            reason = f"the plan has {len(plan.ranks)} ranks"
            raise PlanError(name, getattr(costs, name), reason, "Give it for plans of one rank")
    if any(by_stage["sum_output_s"]) or any(by_stage["sum_gradient_s"]):
        return Timeline(title, (_overlap(plan.ranks[0], duration),))
    times = execute(plan, duration, lambda stage: by_stage["send_s"][stage])
    ranks = tuple(
        tuple(map(Event, actions, [0.0, *ends[:-1]], ends))
        for actions, ends in zip(plan.ranks, times, strict=True)
    )
    return Timeline(title, ranks)


def _overlap(
    actions: Iterable[Action], duration: Callable[[Kind, int], float]
) -> tuple[Event, ...]:
    """Run a plan of one rank on the clock, with the collectives that follow its passes.

    Collectives run one after the other, in the order of the passes after which they start. The
    next pass of the same micro-batch waits for its last one, and the reduction of the gradients
    for all.

    Args:
        actions: In their order.
        duration: Seconds of an action, or of a segment's collective, by kind and segment. What
            takes no time is no collective.

    Returns:
        Actions and collectives in the order in which they begin.
    """
    events: list[Event] = []
    ends: dict[int, float] = {}  # by micro-batch, of the collective for which its next pass waits
    clock = free_s = 0.0
    for action in actions:
        kind, stage, micro_batch, version = action
        if kind is Kind.REDUCE:
            clock = max(clock, free_s)
        elif kind in _COLLECTIVE_AFTER:
            clock = max(clock, ends.get(micro_batch, 0.0))
        start_s = clock
        clock += duration(kind, stage)
        events.append(Event(action, start_s, clock))
        collective = _COLLECTIVE_AFTER.get(kind)
        if collective is not None and (length_s := duration(collective, stage)):
            begin_s, free_s = max(clock, free_s), max(clock, free_s) + length_s
            ends[micro_batch] = free_s
            sums = Action(collective, stage, micro_batch, version)
            events.append(Event(sums, begin_s, free_s))
    return tuple(sorted(events, key=lambda event: event.start_s))


def measured_costs(ranks: Iterable[Iterable[Event]], homes: Sequence[int]) -> Costs:
    """Return the costs of stages whose backward passes are split.

    A pass takes the median of its times. A message takes as long as the fastest one, from the start
    of the send to the end of the receive: later ones may wait for their receiver. It is the mean of
    both directions between two ranks, so the ranks' clocks need not agree.

    Args:
        ranks: For each rank the events of the same optimizer steps, by its own clock.
        homes: For each stage its rank.
    """
    passes: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    sent: dict[Message, list[float]] = defaultdict(list)
    received: dict[Message, list[float]] = defaultdict(list)
    for action, start_s, end_s in (event for events in ranks for event in events):
        if action.kind in COMPUTE:
            passes[action.kind, action.stage].append(end_s - start_s)
        elif action.kind in SENDS:
            sent[message_of(action)].append(start_s)
        elif action.kind in RECEIVES:
            received[message_of(action)].append(end_s)
    fastest: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for message, starts in sent.items():
        kind, stage, *_ = message
        pair = homes[stage], homes[stage + SENDS[kind][1]]
        times = (b - a for a, b in zip(starts, received[message], strict=True))
        fastest[pair] = min(fastest[pair], *times)
    stages = range(len(homes))
    sends = []
    for stage, rank in enumerate(homes):
        others = {homes[s] for s in (stage - 1, stage + 1) if s in stages} - {rank}
        both = [(fastest[rank, other] + fastest[other, rank]) / 2 for other in others]
        sends.append(max([0.0, *both]))
    forward, inputs, weights = (
        tuple(median(passes[kind, stage]) for stage in stages)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    whole = tuple(a + b for a, b in zip(inputs, weights, strict=True))
    return Costs(forward_s=forward, backward_s=whole, weight_s=weights, send_s=tuple(sends))
