# SPDX-License-Identifier: Apache-2.0
"""The order of forward and backward passes on a stage, lowered to everything that a rank does.

Before the backward pass of micro-batch ``m``, stage ``s`` of ``P`` has forwarded all micro-batches
up to ``m + P - 1 - s`` (`ahead`), unless a limit stops it. Without a limit this is PipeMare's
continuous pipeline, which idles only while it fills. With a limit at the end of every optimizer
step it is 1F1B, which empties the pipeline at each step.

The other functions map the actions of one rank to new ones. The order is `add_steps`,
`Versions.annotate`, `add_communication`, and then `overlap_forward_backward` where a stage runs
two passes together, or `defer_sends` where sends block. `lower` does the first three for a plan
that holds nothing but passes, whatever stages a rank has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from wavemare.errors import PlanError
from wavemare.pipeline.clock.clock import execute
from wavemare.pipeline.plan.check import check_shape, check_stages
from wavemare.pipeline.plan.plan import (
    COMPUTE,
    INPUT_GRADIENTS,
    SENDS,
    WEIGHT_GRADIENTS,
    Action,
    Kind,
    Plan,
)

_STEP = Kind.REDUCE, Kind.NORM, Kind.STEP
_BETWEEN = frozenset({Kind.SEND_GRAD, Kind.RECV_ACTIVATION, Kind.LOAD})


def lower(plan: Plan) -> Plan:
    """Add everything but passes to a plan that holds nothing else: steps, messages and loads.

    Each rank steps once, after its last gradient of the step, and has one slot for messages more
    than the plan needs to end.

    Args:
        plan: With its homes, unless each rank has the stage of its number.

    Raises:
        PlanError: A pass is missing or not where it should be, or ranks wait for each other with
            any number of slots.
    """
    plan = replace(plan, send_slots=1)
    check_shape(plan)
    if plan.in_waves and plan.num_stages > 1:
        homes = ",".join("0" * plan.num_stages)
        reason = f"rank 0 has {plan.num_stages} stages"
        raise PlanError("homes", "", reason, f"Add homes={homes} to the plan's header")
    passes_done = Counter(action[:3] for passes in plan.ranks for action in passes)
    if twice := next((pass_ for pass_, times in passes_done.items() if times > 1), None):
        raise PlanError("action", str(Action(*twice)), "it is done a second time", "Leave it out")
    ranks = []
    for passes in plan.ranks:
        gradients = (action for action in passes if action.kind in WEIGHT_GRADIENTS)
        completing = {action.micro_batch // plan.micro_batches: action for action in gradients}
        ends = {action: (step + 1) * plan.micro_batches - 1 for step, action in completing.items()}
        stage = min(action.stage for action in passes)
        actions = Versions().annotate(add_steps(passes, _STEP, ends=ends, stage=stage))
        ranks.append(tuple(add_communication(actions, plan.rank_of)))
    most = 1 + sum(action.kind in SENDS for actions in ranks for action in actions)
    plan = replace(plan, ranks=tuple(ranks), send_slots=most)
    check_stages(plan)
    _run(plan)
    slots = 1
    while slots < most:
        with suppress(PlanError):
            _run(replace(plan, send_slots=slots))
            break
        slots += 1
    return replace(plan, send_slots=slots + 1)


def _run(plan: Plan) -> None:
    execute(plan, lambda kind, _: int(kind in COMPUTE), lambda _: 0)


def add_steps(
    actions: Iterable[Action], kinds: Iterable[Kind], *, ends: Mapping[Action, int], stage: int
) -> Iterator[Action]:
    """Add an optimizer step after each pass that completes one.

    Args:
        actions: Of one rank.
        kinds: What a step consists of.
        ends: The passes that complete a step, with the step's last micro-batch.
        stage: The first one of the rank.
    """
    for action in actions:
        yield action
        if action in ends:
            yield from (Action(kind, stage, ends[action]) for kind in kinds)


def _step_kinds(stage: int, num_stages: int, *, norms: bool, synchronous: bool) -> list[Kind]:
    """Return what an optimizer step of a stage consists of.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        norms: Whether stages exchange gradient norms. Each stage then knows the norm of all later
            stages for this very step.
        synchronous: Whether the step empties the pipeline. The norm of all stages then travels
            back, so that it is exact on every stage.
    """
    first, last = stage == 0, stage == num_stages - 1
    kinds = [Kind.REDUCE]
    if norms:
        kinds += [Kind.RECV_NORM] * (not last) + [Kind.SEND_NORM] * (not first)
    if norms and synchronous:
        kinds += [Kind.RECV_TOTAL] * (not first) + [Kind.SEND_TOTAL] * (not last)
    return [*kinds, Kind.STEP]


class Versions:
    """Fills in the version of a stage's weights that each action meets; keeps count over calls.

    Args:
        correct: Whether to put `CORRECT` and `RESTORE` around the backward passes of micro-batches
            whose forward pass saw older weights.
    """

    def __init__(self, *, correct: bool = False) -> None:
        self._correct = correct
        self._newest = 0
        self._forward: dict[int, int] = {}

    def annotate(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Return the actions with their versions."""
        for action in actions:
            kind, stage, micro_batch, _, wave = action
            newest = self._newest
            if kind is Kind.FORWARD:
                self._forward[micro_batch] = newest
            elif kind is Kind.STEP:
                self._newest += 1
            elif kind is Kind.BACKWARD:
                seen = self._forward.pop(micro_batch, newest)
                if self._correct and seen < newest:
                    yield Action(Kind.CORRECT, stage, micro_batch, seen, wave)
                    yield Action(kind, stage, micro_batch, newest, wave)
                    yield Action(Kind.RESTORE, stage, micro_batch, newest, wave)
                    continue
            yield Action(kind, stage, micro_batch, newest, wave)


def add_communication(actions: Iterable[Action], homes: Sequence[int]) -> Iterator[Action]:
    """Add loading, receives and sends around the passes of one rank.

    Args:
        actions: In their order.
        homes: For each stage its rank. What stays on a rank is neither sent nor received.
    """
    head = len(homes) - 1
    for action in actions:
        kind, stage = action.kind, action.stage
        before = stage > 0 and homes[stage - 1] != homes[stage]
        after = stage < head and homes[stage + 1] != homes[stage]
        if kind is Kind.FORWARD:
            if before:
                yield action._replace(kind=Kind.RECV_ACTIVATION)
            if stage == 0 or (stage == head and homes[0] != homes[head]):
                yield action._replace(kind=Kind.LOAD)
            yield action
            if after:
                yield action._replace(kind=Kind.SEND_ACTIVATION)
        elif kind in INPUT_GRADIENTS:
            if after:
                yield action._replace(kind=Kind.RECV_GRAD)
            yield action
            if before:
                yield action._replace(kind=Kind.SEND_GRAD)
        else:
            yield action


def defer_sends(actions: Iterable[Action], num_stages: int) -> Iterator[Action]:
    """Put a send of activations behind a receive of gradients that the next stage serves first.

    Two neighbours whose sends block would wait for each other otherwise. The next stage, which
    forwards one micro-batch less ahead, goes backward before it takes the activation of a
    micro-batch that this stage forwards furthest ahead.
    """
    held: Action | None = None
    for action in actions:
        if held is not None:
            furthest = action.micro_batch + num_stages - 1 - action.stage
            if action.kind is Kind.RECV_GRAD and held.micro_batch >= furthest:
                yield action
                yield held
                held = None
                continue
            yield held
            held = None
        if action.kind is Kind.SEND_ACTIVATION:
            held = action
        else:
            yield action
    if held is not None:
        yield held


def overlap_forward_backward(actions: Iterable[Action]) -> Iterator[Action]:
    """Put each backward pass right before the forward pass that follows it, to run them together.

    Their receives come before both passes and their sends after both. A pass stays alone if an
    optimizer step or a change of weights separates it from the next pass.
    """
    row = list(actions)
    place = 0
    while place < len(row):
        last = _following_forward(row, place)
        if last is None:
            yield row[place]
            place += 1
            continue
        between = row[place + 1 : last]
        yield from (action for action in between if action.kind is not Kind.SEND_GRAD)
        yield row[place]
        yield row[last]
        yield from (action for action in between if action.kind is Kind.SEND_GRAD)
        place = last + 1


def _following_forward(row: Sequence[Action], place: int) -> int | None:
    """Return the index of a backward pass's partner; None if there is none."""
    if row[place].kind is not Kind.BACKWARD:
        return None
    for later in range(place + 1, len(row)):
        if row[later].kind not in _BETWEEN:
            return later if row[later].kind is Kind.FORWARD else None
    return None


class Pair(NamedTuple):
    """A backward pass and the forward pass after it, run together."""

    backward: Action
    forward: Action

    def __str__(self) -> str:
        return f"Pair {self.backward} {self.forward}"


def in_pairs(actions: Iterable[Action]) -> list[Action | Pair]:
    """Return the actions, with each adjacent backward and forward pass as a `Pair`."""
    result: list[Action | Pair] = []
    for action in actions:
        before = result[-1] if result and action.kind is Kind.FORWARD else None
        if isinstance(before, Action) and before.kind is Kind.BACKWARD:
            result[-1] = Pair(before, action)
        else:
            result.append(action)
    return result


@cache
def ahead(stage: int, num_stages: int, slack: int = 0) -> int:
    """Return how many micro-batches a stage forwards ahead of its backward passes.

    It is also the delay of the stage's gradients in micro-batches (d_i of PipeMare's delay model
    for a pipeline that does one pass at a time).

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        slack: Extra micro-batches in flight for each later stage. At 0 a round trip to the next
            stage just fits, so the latency of messages is not hidden.
    """
    return (num_stages - 1 - stage) * (1 + slack)


class StageSchedule:
    """The endless schedule of one stage, taken one optimizer step at a time.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        norms: Whether the stages exchange their gradient norms.
        correct: Whether backward passes of stale micro-batches use corrected weights.
        slack: See `ahead`.

    Attributes:
        first: First micro-batch of the next step.
        forwarded: How many micro-batches the stage has forwarded.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        micro_batches: int,
        *,
        norms: bool = False,
        correct: bool = False,
        slack: int = 0,
    ) -> None:
        self._stage = stage
        self._num_stages = num_stages
        self._micro_batches = micro_batches
        self._norms = norms
        self._ahead = ahead(stage, num_stages, slack)
        self._versions = Versions(correct=correct)
        self._empty_at = 0
        self.first = 0
        self.forwarded = 0

    def step(self, stop: int | None = None) -> list[Action]:
        """Return the stage's actions up to the end of its next optimizer step.

        Args:
            stop: How many micro-batches of the run may be forwarded; None for no limit. If it is
                the end of the step, the pipeline is empty after it.
        """
        last = self.first + self._micro_batches
        kinds = _step_kinds(
            self._stage,
            self._num_stages,
            norms=self._norms,
            synchronous=self._empty_at == self.first and stop == last,
        )
        end = Action(Kind.BACKWARD, self._stage, last - 1)
        actions = add_steps(
            self._passes(last, stop), kinds, ends={end: last - 1}, stage=self._stage
        )
        actions = self._versions.annotate(actions)
        result = list(add_communication(actions, range(self._num_stages)))
        self.first = last
        if stop == last:
            self._empty_at = last
        return result

    def _passes(self, last: int, stop: int | None) -> Iterator[Action]:
        for micro_batch in range(self.first, last):
            limit = micro_batch + self._ahead + 1
            if stop is not None:
                limit = min(limit, stop)
            for forward in range(self.forwarded, limit):
                yield Action(Kind.FORWARD, self._stage, forward)
            self.forwarded = max(self.forwarded, limit)
            yield Action(Kind.BACKWARD, self._stage, micro_batch)
