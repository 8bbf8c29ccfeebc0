# SPDX-License-Identifier: Apache-2.0
"""A list scheduler that finds the order of passes for given times and a limit of memory.

A list schedule takes, again and again, the pass that can start first. Settings say which of several
comes first, and what gap the gradients of the weights fill. The best of all settings and of the
known orders is taken. A micro-batch's activations are kept until its W.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from wavemare.errors import PlanError
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.check import Memory
from wavemare.pipeline.plan.orders import passes_to_plan, vee, zbv
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind, Plan, check_numbers

EQUAL_PASSES = Costs(forward_s=0.5, backward_s=1.0, weight_s=0.5)
"""Passes of two stages per rank where nothing is measured: F, I and W take the same time."""

_F, _B = Kind.FORWARD, Kind.BACKWARD
_I, _W = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_MOST_PASSES = 10_000  # forward passes of ranks: about half a minute
_TOLERANCE = 1e-9  # of a micro-batch's time

# The settings of a list schedule, beside how many stages' activations a rank keeps.
_WEIGHT_GAPS = 0.0, 0.5, 1.0
"""The shortest gap that a gradient of the weights fills, in times of W."""
_PREFERENCES = "backward", "forward", "alternate"
"""What comes first of forward and backward passes that can start."""
_ORDERS = "deepest", "oldest", "rounds"
"""Which of several comes first: the deepest stage's, the oldest micro-batch's, or stage by stage in
rounds of as many micro-batches as ranks."""
_Setting = tuple[int, float, str, str]


def automatic(
    num_ranks: int,
    micro_batches: int,
    num_steps: int = 1,
    *,
    costs: Costs = EQUAL_PASSES,
    memory_limit: float = 1.0,
) -> Plan:
    """Return the best plan that is found for a V of two stages per rank with split passes.

    A better one may exist: of four small cases with a known optimum, one takes 1.08 times as long.

    Args:
        num_ranks: Length of the pipeline.
        micro_batches: Per optimizer step.
        num_steps: Optimizer steps.
        costs: Of the stages.
        memory_limit: Activations of each rank, as a share of 1F1B's on its first rank.

    Raises:
        PlanError: A number is out of range, or the limit leaves less than one micro-batch.
    """
    check_numbers(num_ranks, micro_batches, num_steps)
    if num_ranks * micro_batches > _MOST_PASSES:
        reason = f"{num_ranks} x {micro_batches} forward passes take minutes to put into order"
        remedy = f"Give numbers whose product is at most {_MOST_PASSES}, or choose zbv"
        raise PlanError("micro_batches", micro_batches, reason, remedy)
    most = min(num_ranks, micro_batches)
    if not 1 - _TOLERANCE <= memory_limit * most < math.inf:
        reason = f"1F1B keeps {most} micro-batches, and a rank has to keep one"
        remedy = f"Give {1 / most:.3g} or more, and finite"
        raise PlanError("memory_limit", memory_limit, reason, remedy)
    homes, known = vee(num_ranks), [zbv(num_ranks, micro_batches)]
    limit = memory_limit * most
    passes = search(homes, micro_batches, costs, limit, known=known)
    return passes_to_plan("auto", homes, passes, micro_batches, num_steps)


def search(
    homes: Sequence[int],
    micro_batches: int,
    costs: Costs,
    limit: float,
    *,
    known: Iterable[Plan] = (),
) -> list[list[Action]]:
    """Return for each rank the passes of the shortest step that is found, all backward ones split.

    Args:
        homes: For each stage its rank; all ranks have as many.
        micro_batches: Per optimizer step.
        costs: Of the stages.
        limit: Micro-batches whose activations a rank keeps at most.
        known: Plans of the same stages, which are taken if they fit and are shorter.

    Raises:
        PlanError: No schedule keeps to the limit.
    """
    chunks = max(Counter(homes).values())
    costs = replace(costs, step_s=0.0)
    best, best_s = None, math.inf
    for plan in known:
        memory = Memory.in_micro_batches(plan)
        step_s = simulate(plan, costs).makespan_s
        if step_s < best_s and max(map(memory.peak, plan.ranks)) <= limit + _TOLERANCE:
            ranks = [[a._replace(version=-1) for a in r if a.kind in COMPUTE] for r in plan.ranks]
            best, best_s = ranks, step_s
    slots = int(limit * chunks + _TOLERANCE)
    levels = slots, slots - 1, slots - 2
    for setting in product(levels, _WEIGHT_GAPS, _PREFERENCES, _ORDERS[: chunks + 1]):
        schedule = _ListSchedule(homes, micro_batches, costs, setting)
        if schedule.fill(best_s):
            best, best_s = schedule.ranks, max(schedule.clocks)
    if best is None:
        reason = f"no schedule of {len(homes)} stages keeps to it"
        raise PlanError("memory_limit", limit, reason, "Raise memory_limit")
    return best


def lower_bound(homes: Sequence[int], micro_batches: int, costs: Costs, *, split: bool) -> float:
    """Return the seconds that no optimizer step of these passes can fall below.

    It is the longer of two: the work of a rank after its first micro-batch has come to it, and the
    time of one micro-batch for its passes on all stages, one after the other, with its messages.
    Where backward passes are split, only the first stage's W counts.
    """
    durations, sends = costs.durations(len(homes)), costs.of("send_s", len(homes))
    starts: dict[int, float] = {}
    work = dict.fromkeys(homes, 0.0)
    path = back = 0.0
    for stage, rank in enumerate(homes):
        if stage and homes[stage - 1] != rank:
            path += sends[stage - 1]
            back += sends[stage]
        starts.setdefault(rank, path)
        path += durations[_F][stage]
        back += durations[_I if split else _B][stage]
        work[rank] += durations[_F][stage] + durations[_B][stage]
    busy = max(starts[rank] + micro_batches * work[rank] for rank in starts)
    return max(busy, path + back + split * durations[_W][0])


class _ListSchedule:
    """One list schedule, as far as it is filled.

    Attributes:
        ranks: For each rank its passes.
        clocks: For each rank the end of the last one, in seconds.
    """

    def __init__(
        self, homes: Sequence[int], micro_batches: int, costs: Costs, setting: _Setting
    ) -> None:
        self._slots, self._weight_gap, self._prefer, self._order = setting
        self._homes = homes
        self._head = len(homes) - 1
        self._micro_batches = micro_batches
        self._durations = costs.durations(len(homes))
        self._sends = costs.of("send_s", len(homes))
        num_ranks = max(homes) + 1
        self._stages = [[s for s, r in enumerate(homes) if r == rank] for rank in range(num_ranks)]
        self._round = [self._stages[rank].index(stage) for stage, rank in enumerate(homes)]
        self._done = {kind: [0] * len(homes) for kind in (_F, _I, _W)}
        self._ends: dict[Action, float] = {}
        self._kept = [0] * num_ranks
        self._last = [_I] * num_ranks
        self._left = [
            micro_batches * sum(self._durations[k][s] for s in stages for k in self._done)
            for stages in self._stages
        ]
        self._tolerance = _TOLERANCE * max(self._left) / micro_batches
        self.ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.clocks = [0.0] * num_ranks

    def fill(self, bound_s: float) -> bool:
        """Schedule all passes; return whether they end before a bound, in seconds."""
        choices = [self._choose(rank) for rank in range(len(self.ranks))]
        for _ in range(len(self._done) * len(self._homes) * self._micro_batches):
            ready = [(choice[0], r, choice[1]) for r, choice in enumerate(choices) if choice]
            if not ready:
                return False  # the limit leaves no way
            start, rank, action = min(ready)
            self._do(rank, start, action)
            if self.clocks[rank] + self._left[rank] >= bound_s - self._tolerance:
                return False
            # Only this rank, and the one that waited for this pass, may choose anew.
            step = 1 if action.kind is _F else -1
            neighbour = min(max(action.stage + step, 0), self._head)
            for other in {rank, self._homes[neighbour]}:
                choices[other] = self._choose(other)
        return True

    def _do(self, rank: int, start: float, action: Action) -> None:
        kind, stage = action.kind, action.stage
        length = self._durations[kind][stage]
        self.clocks[rank] = self._ends[action] = start + length
        self._left[rank] -= length
        self._done[kind][stage] += 1
        self._kept[rank] += (kind is _F) - (kind is _W)
        if kind is not _W:
            self._last[rank] = kind
        self.ranks[rank].append(action)

    def _choose(self, rank: int) -> tuple[float, Action] | None:
        """Return a rank's next pass and its start; None if there is none yet."""
        now = self.clocks[rank]
        waiting = list(self._candidates(rank))
        first = {"forward": _F, "backward": _I}.get(self._prefer)
        if first is None:
            first = _F if self._last[rank] is _I else _I
        if ready := [a for start, a in waiting if start <= now + self._tolerance]:
            return now, min(
                ready, key=lambda a: (a.kind is not first, self._place(a), a.micro_batch)
            )
        soonest = min(
            waiting, key=lambda w: (w[0], w[1].kind is not first, -w[1].stage), default=None
        )
        owed = self._owed(rank)
        if owed is not None:
            gap = self._weight_gap * self._durations[_W][owed.stage] - self._tolerance
            if soonest is None or soonest[0] - now >= gap:
                return now, owed
        return soonest

    def _candidates(self, rank: int) -> Iterator[tuple[float, Action]]:
        """Yield a rank's forward and input-gradient passes whose inputs have a known time."""
        forwards, backwards = self._done[_F], self._done[_I]
        for stage in self._stages[rank]:
            m = backwards[stage]
            if m < forwards[stage] and (stage == self._head or backwards[stage + 1] > m):
                kind, source = (_F, stage) if stage == self._head else (_I, stage + 1)
                yield self._arrival(rank, Action(kind, source, m)), Action(_I, stage, m)
            m = forwards[stage]
            # Each later round keeps a slot, or the earlier ones might fill the memory for good.
            later = len(self._stages[rank]) - 1 - self._round[stage]
            if m == self._micro_batches or self._kept[rank] >= self._slots - later:
                continue
            if stage == 0:
                yield 0.0, Action(_F, stage, m)
            elif forwards[stage - 1] > m:
                yield self._arrival(rank, Action(_F, stage - 1, m)), Action(_F, stage, m)

    def _arrival(self, rank: int, source: Action) -> float:
        sent = self._homes[source.stage] != rank
        return self._ends[source] + sent * self._sends[source.stage]

    def _owed(self, rank: int) -> Action | None:
        """Return the oldest gradient of weights that a rank can compute."""
        inputs, weights = self._done[_I], self._done[_W]
        owed = [(weights[s], -s) for s in self._stages[rank] if weights[s] < inputs[s]]
        return Action(_W, -min(owed)[1], min(owed)[0]) if owed else None

    def _place(self, action: Action) -> int:
        """Return a pass's place in the setting's order."""
        if self._order == "deepest":
            return -action.stage
        if self._order == "oldest":
            return action.micro_batch
        chunks, number = len(self._stages[self._homes[action.stage]]), self._round[action.stage]
        if action.kind is not _F:
            number = chunks - 1 - number
        return action.micro_batch // len(self.ranks) * chunks + number
