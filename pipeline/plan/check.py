# SPDX-License-Identifier: Apache-2.0
"""Proves a plan before it runs: that it is complete, in order, consistent, and that it ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, zip_longest

from wavemare.errors import PlanError, check_number
from wavemare.pipeline.clock.clock import execute
from wavemare.pipeline.plan.cursor import OF_A_STEP, PlanCursor
from wavemare.pipeline.plan.plan import (
    COMPUTE,
    INPUT_GRADIENTS,
    SENDS,
    WEIGHT_GRADIENTS,
    Action,
    Kind,
    Plan,
    check_numbers,
    message_of,
)

_MESSAGES = {
    Kind.SEND_ACTIVATION: "activations",
    Kind.SEND_GRAD: "gradients",
    Kind.SEND_NORM: "norms",
    Kind.SEND_TOTAL: "total norms",
}


@dataclass(frozen=True)
class Memory:
    """What activations take on each stage, in micro-batches of a whole rank.

    Args:
        activations: What a micro-batch keeps from its forward pass until all of its gradients
            are there.
        limit: The most on each rank; None for none.
    """

    activations: tuple[float, ...]
    limit: float | None = None

    @classmethod
    def in_micro_batches(cls, plan: Plan, limit: float | None = None) -> Memory:
        """Count activations of whole ranks."""
        stages = Counter(plan.rank_of)
        shares = tuple(1 / stages[rank] for rank in plan.rank_of)
        return cls(shares, limit)

    def check(self, plan: Plan) -> None:
        """Check that it is for this plan, and its limit a positive number.

        Raises:
            PlanError: It is not.
        """
        reason = "" if plan.num_steps else "the plan does not train"
        if self.limit is not None and not 0 < self.limit < math.inf:
            reason = "it is not positive and finite"
        if reason:
            raise PlanError("memory_limit", self.limit, reason, "Leave it out")
        if len(self.activations) != plan.num_stages:
            reason = f"the plan has {plan.num_stages} stages"
            raise PlanError("memory", len(self.activations), reason, "Give a number for each stage")

    def peak(self, actions: Iterable[Action]) -> float:
        """Return the most that a rank keeps.

        Raises:
            PlanError: It is more than the limit.
        """
        kept = most = 0.0
        for action in actions:
            if action.kind is Kind.FORWARD:
                kept += self.activations[action.stage]
            elif action.kind in WEIGHT_GRADIENTS:
                kept -= self.activations[action.stage]
            most = max(most, kept)
            if self.limit is not None and most > self.limit * (1 + 1e-9):
                reason = f"with it the rank keeps {most:.6g}, and the limit is {self.limit:.6g}"
                remedy = "Put gradients of earlier micro-batches before it, or raise memory_limit"
                raise PlanError("action", str(action), reason, remedy)
        return most


@dataclass(frozen=True)
class Report:
    """Properties of a plan that has passed its check.

    A tick is the time of one forward or backward pass; everything else takes none.

    Args:
        plan: The plan.
        actions: For each rank the number of its actions.
        peak_activations: For each stage the most micro-batches whose forward pass was done and
            whose backward pass was not, or not all of it; 0 where there are no backward passes.
        peak_memory: For each rank the most that it keeps (see `Memory`); empty for plans without
            homes unless a memory was given.
        staleness: For each stage and, in their order, each micro-batch: the optimizer steps of the
            stage between the micro-batch's forward and backward pass. Empty without backward
            passes.
        ticks: Length of the whole plan.
        idle_ticks: For each rank the ticks in which it does no pass.
        messages: How many messages of each kind are sent.
    """

    plan: Plan = field(compare=False)
    actions: tuple[int, ...]
    peak_activations: tuple[int, ...]
    peak_memory: tuple[float, ...]
    staleness: tuple[tuple[int, ...], ...]
    ticks: int
    idle_ticks: tuple[int, ...]
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

    def __str__(self) -> str:
        plan = self.plan
        sent = [f"{self.messages.get(kind, 0)} {name}" for kind, name in _MESSAGES.items()]
        lines = [
            f"{plan.schedule}: stages {plan.num_stages}, micro-batches per step "
            f"{plan.micro_batches}, optimizer steps {plan.num_steps}",
            f"length: {self.ticks} ticks of one pass each",
            f"bubble: {self.bubble:.1%} of all ticks",
            f"messages: {', '.join(sent)}",
            "",
        ]
        return "\n".join(lines + _table(self)) + "\n"


def check(plan: Plan, memory: Memory | None = None) -> Report:
    """Prove that a plan can be run and trains what it should.

    * Every stage has its actions on one rank, its home, and does each of them once: for every
      micro-batch load (first and last stage, or the first for both), receive, forward, send,
      receive, backward, send, as far as it has that neighbour on another rank. A neighbour on the
      same rank comes before it.
    * A backward pass is whole, or split into the gradients of the input and, later, of the weights.
      The gradients of the weights are added up in the order of micro-batches.
    * With homes, split passes or `NORM`, the pipeline is empty at each step: no forward pass comes
      before the step of the earlier micro-batches. With homes, a rank has one step, of its first
      stage. All steps have the norm, or none.
    * No rank keeps more activations than the limit of ``memory``, if there is one.
    * The gradients of optimizer step ``k`` are reduced after all backward passes of its
      micro-batches and before all others, and once; the step comes after it, and before the next
      backward pass. Versions that are filled in are the number of optimizer steps so far; `CORRECT`
      names that of the forward pass, and between it and its `RESTORE` there is only that backward
      pass with its messages.
    * Each message is sent once and received once, and the first and last stage load in the same
      order. Without homes, split passes and `NORM`, messages are received in the order in which
      they are sent.
    * No ranks wait for each other in a circle, with the plan's `send_slots`.

    Raises:
        PlanError: The plan is wrong; the message names the actions in question.
    """
    cursors = check_stages(plan)
    for before, after in pairwise(cursors):
        _check_messages(before.sent[1], after.received[1], in_order=not plan.flushes)
        _check_messages(after.sent[-1], before.received[-1], in_order=not plan.flushes)
    if cursors[-1].loads:  # both stages read the same stream of micro-batches
        for one, other in zip(cursors[0].loads, cursors[-1].loads, strict=True):
            if one.micro_batch != other.micro_batch:
                reason = f"stage {one.stage} loads {one} there"
                raise PlanError(
                    "action", str(other), reason, "Load in the same order on both stages"
                )
    if memory is None and plan.homes and plan.num_steps:
        memory = Memory.in_micro_batches(plan)
    if memory is not None:
        memory.check(plan)
    times = execute(plan, lambda kind, _: int(kind in COMPUTE), lambda _: 0)
    return _report(plan, cursors, times, memory)


@lru_cache(maxsize=1)
def check_stages(plan: Plan) -> Sequence[PlanCursor]:
    """Check each stage's actions and their order, but neither messages nor that the plan ends.

    The last result is kept: `lower` and `check` both ask for it.

    Returns:
        For each stage what was found.

    Raises:
        PlanError: The plan is wrong; the message names the action in question.
    """
    check_shape(plan)
    cursors = [PlanCursor(stage, plan) for stage in range(plan.num_stages)]
    for rank, actions in enumerate(plan.ranks):
        rows = {s: list[Action]() for s, home in enumerate(plan.rank_of) if home == rank}
        first = min(rows)
        for action in actions:
            of_all = plan.homes and action.kind in OF_A_STEP
            if of_all and action.stage != first:
                reason = f"a rank steps once, for all its stages, as stage {first}"
                remedy = f"Write {action._replace(stage=first, version=-1)}"
                raise PlanError("action", str(action), reason, remedy)
            for stage in rows if of_all else (action.stage,):
                rows[stage].append(action)
        for stage, row in rows.items():
            cursors[stage].follow(row)
    if any(one == other for one, other in pairwise(plan.rank_of)):
        for actions in plan.ranks:
            _check_local(plan, actions)
    return cursors


def check_shape(plan: Plan) -> None:
    """Check the plan's numbers, and that each stage is on its rank.

    Raises:
        PlanError: They are wrong; the message names the number or an action.
    """
    check_numbers(plan.num_stages, plan.micro_batches, plan.num_steps)
    check_number(PlanError, "send_slots", plan.send_slots, 1, whole=True)
    if plan.homes and len(plan.homes) != plan.num_stages:
        reason = f"these are {len(plan.homes)} ranks for {plan.num_stages} stages"
        raise PlanError("homes", plan.homes, reason, "Give the rank of each stage")
    homes: dict[int, int] = {}
    own = plan.homes or (range(plan.num_stages) if len(plan.ranks) == plan.num_stages else None)
    for rank, actions in enumerate(plan.ranks):
        for stage in {action.stage for action in actions}:
            sample = str(next(action for action in actions if action.stage == stage))
            if not 0 <= stage < plan.num_stages:
                reason = f"a plan of {plan.num_stages} stages has no stage {stage}"
                raise PlanError("action", sample, reason, "Leave it out")
            if homes.setdefault(stage, own[stage] if own else rank) != rank:
                reason = f"it is on rank {rank}, but stage {stage} is on rank {homes[stage]}"
                raise PlanError("action", sample, reason, "Keep each stage's actions on its rank")
    idle = [rank for rank, actions in enumerate(plan.ranks) if not actions]
    # Not all of them: the number of stages may be a mistyped one.
    missing = next((stage for stage in range(plan.num_stages) if stage not in homes), None)
    if idle or missing is not None:
        reason = f"rank {idle[0]} does nothing" if idle else f"stage {missing} does nothing"
        raise PlanError("plan", plan.schedule, reason, "Give each stage its actions")
    if not plan.homes and len(plan.ranks) != plan.num_stages:
        reason = f"there are {plan.num_stages} stages, and {len(plan.ranks)} ranks"
        given = ",".join(str(homes[stage]) for stage in range(plan.num_stages))
        raise PlanError("homes", "", reason, f"Add homes={given} to the plan's header")


def _check_local(plan: Plan, actions: Sequence[Action]) -> None:
    """Check the order of what a rank's stages hand each other without a message."""
    homes, head = plan.rank_of, plan.num_stages - 1
    done: set[tuple[bool, int, int]] = set()
    for action in actions:
        kind, stage, micro_batch, _ = action
        forward = kind is Kind.FORWARD
        if not forward and kind not in INPUT_GRADIENTS:
            continue
        other = stage - 1 if forward else stage + 1
        local = 0 <= other <= head and homes[other] == homes[stage]
        if local and (forward, other, micro_batch) not in done:
            needed = Action(kind, other, micro_batch)
            reason = f"{needed} does not come before it"
            raise PlanError("action", str(action), reason, f"Put {needed} before it")
        done.add((forward, stage, micro_batch))


def _check_messages(sent: list[Action], received: list[Action], *, in_order: bool) -> None:
    """Check that messages between two stages are received, and where asked in their order."""
    if not in_order:
        sent, received = sorted(sent, key=message_of), sorted(received, key=message_of)
    if list(map(message_of, sent)) == list(map(message_of, received)):
        return
    for send, receive in zip_longest(sent, received):
        if send is None:
            raise PlanError("action", str(receive), "its message is never sent", "Add the send")
        kind, step = SENDS[send.kind]
        expected = Action(kind, send.stage + step, send.micro_batch)
        if receive is None:
            raise PlanError("action", str(send), "its message is never received", f"Add {expected}")
        if receive._replace(version=-1) != expected:
            reason = f"the next message to arrive is that of {send}, which {expected} would receive"
            remedy = f"Send and receive in the same order between stages {send.stage} and "
            remedy += f"{receive.stage}"
            raise PlanError("action", str(receive), reason, remedy)


def _report(
    plan: Plan, cursors: Sequence[PlanCursor], times: list[list[float]], memory: Memory | None
) -> Report:
    """Put together what the cursors and the execution in ticks have found."""
    ends = [
        [end for end, action in zip(rank, actions, strict=True) if action.kind in COMPUTE]
        for rank, actions in zip(times, plan.ranks, strict=True)
    ]
    ticks = round(max(rank[-1] for rank in ends))
    sends = [action.kind for cursor in cursors for sent in cursor.sent.values() for action in sent]
    return Report(
        plan=plan,
        actions=tuple(map(len, plan.ranks)),
        peak_activations=tuple(cursor.peak if plan.num_steps else 0 for cursor in cursors),
        peak_memory=tuple(map(memory.peak, plan.ranks)) if memory else (),
        staleness=tuple(
            tuple(s for _, s in sorted(cursor.staleness.items())) for cursor in cursors
        ),
        ticks=ticks,
        idle_ticks=tuple(ticks - len(rank) for rank in ends),
        messages=Counter(sends),
    )


def _table(report: Report) -> list[str]:
    """Return a line for each stage and for each rank: the same lines where these are the same."""
    columns: list[list[object]] = [["rank", *range(len(report.actions))]]
    columns += [["actions", *report.actions], ["idle ticks", *report.idle_ticks]]
    if report.peak_memory:
        columns.append(["peak memory (micro-batches)", *(f"{p:.6g}" for p in report.peak_memory)])
    ranks = [tuple(map(str, row)) for row in zip(*columns, strict=True)]
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
