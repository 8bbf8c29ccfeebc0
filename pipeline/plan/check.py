# SPDX-License-Identifier: Apache-2.0
"""Proves a plan before it runs: that it is complete, in order, consistent, and that it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from wavemare.errors import PlanError
from wavemare.pipeline.clock.clock import execute
from wavemare.pipeline.plan.cursor import PlanCursor
from wavemare.pipeline.plan.plan import COMPUTE, SENDS, Action, Kind, Plan

__all__ = ["Report", "check"]

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
        sent = [f"{self.messages.get(kind, 0)} {name}" for kind, name in _MESSAGES.items()]
        lines = [
            f"{self.schedule}: stages {self.num_stages}, micro-batches per step "
            f"{self.micro_batches}, optimizer steps {self.num_steps}",
            f"length: {self.ticks} ticks of one pass each",
            f"bubble: {self.bubble:.1%} of all ticks",
            f"messages: {', '.join(sent)}",
            "",
        ]
        return "\n".join(lines + _table(self)) + "\n"


def check(plan: Plan) -> Report:
    """Prove that a plan can be run and trains what it should.

    * Every stage has its actions on one rank, with as many ranks as stages on the rank of its
      number, and does each of them once: for every micro-batch load (first and last stage),
      receive, forward, send, receive, backward, send, as far as it has that neighbour.
    * The gradients of optimizer step ``k`` are reduced after all backward passes of its
      micro-batches and before all others, and once; the step comes after it, and before the next
      backward pass or the plan's `step_delay` later. Versions that are filled in are the
      number of optimizer steps so far; `CORRECT` names that of the forward pass, and between it
      and its `RESTORE` there is only that backward pass with its messages.
    * In each direction between two stages the messages are received in the order in which they are
      sent, and the first and last stage load in the same order.
    * No ranks wait for each other in a circle, with the plan's `send_slots`.
    * One rank with several stages has no messages, and the first stage loads for all. Each
      micro-batch is forwarded by the stages in their order and backwarded in the opposite one; the
      last stage goes backward right after its forward pass. There are two waves at most, and each
      has one micro-batch under way.

    Raises:
        PlanError: The plan is wrong; the message names the actions in question.
    """
    _check_shape(plan)
    cursors = [PlanCursor(stage, plan) for stage in range(plan.num_stages)]
    for actions in plan.ranks:
        for stage in sorted({action.stage for action in actions}):
            cursors[stage].follow(action for action in actions if action.stage == stage)
    if plan.on_one_rank:
        _check_segments(plan)
    else:
        for before, after in pairwise(cursors):
            _check_messages(before.sent[1], after.received[1])
            _check_messages(after.sent[-1], before.received[-1])
        _check_loads(cursors[0].loads, cursors[-1].loads)
    times = execute(plan, lambda kind, _: int(kind in COMPUTE), lambda _: 0)
    return _report(plan, cursors, times)


def _check_shape(plan: Plan) -> None:
    """Check the plan's numbers, and that each stage is on one rank."""
    numbers = {"stages": (plan.num_stages, 1), "micro_batches": (plan.micro_batches, 1)}
    numbers |= {"steps": (plan.num_steps, 0), "send_slots": (plan.send_slots, 0)}
    numbers |= {"step_delay": (plan.step_delay, 0)}
    for key, (value, least) in numbers.items():
        if value < least:
            raise PlanError(key, value, "it is too small", f"Give {least} or more")
    homes: dict[int, int] = {}
    for rank, actions in enumerate(plan.ranks):
        for stage in {action.stage for action in actions}:
            sample = str(next(action for action in actions if action.stage == stage))
            if not 0 <= stage < plan.num_stages:
                reason = f"a plan of {plan.num_stages} stages has no stage {stage}"
                raise PlanError("action", sample, reason, "Leave it out")
            home = rank if len(plan.ranks) != plan.num_stages else stage
            if homes.setdefault(stage, home) != rank:
                reason = f"it is on rank {rank}, but stage {stage} is on rank {homes[stage]}"
                raise PlanError("action", sample, reason, "Keep each stage's actions on its rank")
    idle = [rank for rank, actions in enumerate(plan.ranks) if not actions]
    # Not all of them: the number of stages may be a mistyped one.
    missing = next((stage for stage in range(plan.num_stages) if stage not in homes), None)
    if idle or missing is not None:
        reason = f"rank {idle[0]} does nothing" if idle else f"stage {missing} does nothing"
        raise PlanError("plan", plan.schedule, reason, "Give each stage its actions")


def _check_messages(sent: list[Action], received: list[Action]) -> None:
    """Check that the messages of one direction are received in the order of their sends."""
    meets = {kind: receive for kind, (receive, _) in SENDS.items()}
    coming = [(meets[kind], micro_batch, wave) for kind, _, micro_batch, _, wave in sent]
    if coming == [(kind, micro_batch, wave) for kind, _, micro_batch, _, wave in received]:
        return
    for send, receive in zip_longest(sent, received):
        if send is None:
            raise PlanError("action", str(receive), "its message is never sent", "Add the send")
        kind, step = SENDS[send.kind]
        expected = Action(kind, send.stage + step, send.micro_batch, wave=send.wave)
        if receive is None:
            reason = "its message is never received"
            raise PlanError("action", str(send), reason, f"Add {expected}")
        if receive._replace(version=-1) != expected:
            reason = f"the next message to arrive is that of {send}, which {expected} would receive"
            remedy = f"Send and receive in the same order between stages {send.stage} and "
            remedy += f"{receive.stage}"
            raise PlanError("action", str(receive), reason, remedy)


def _check_loads(first: list[Action], last: list[Action]) -> None:
    """Check that the first and last stage read the same stream of micro-batches."""
    for one, other in zip(first, last, strict=True):
        if one[2::2] != other[2::2]:
            reason = f"stage {one.stage} loads {one} there"
            raise PlanError("action", str(other), reason, "Load in the same order on both stages")


def _check_segments(plan: Plan) -> None:
    """Check what takes the place of messages where one rank has several stages."""
    head = plan.num_stages - 1
    if not head:
        return
    actions = plan.ranks[0]
    done: set[Action] = set()
    under_way: dict[int, int] = {}
    for action, following in zip_longest(actions, actions[1:]):
        kind, stage, micro_batch, _, wave = action
        step = {Kind.FORWARD: -1, Kind.BACKWARD: 1}.get(kind, 0)
        needed = Action(kind, stage + step, micro_batch, wave=wave)
        if step and 0 <= needed.stage <= head and needed not in done:
            reason = f"{needed} does not come before it"
            raise PlanError("action", str(action), reason, f"Put {needed} before it")
        done.add(action._replace(version=-1))
        if not plan.num_steps:
            continue
        if kind is Kind.FORWARD and stage == head:
            backward = action._replace(kind=Kind.BACKWARD, version=-1)
            if following is None or following._replace(version=-1) != backward:
                reason = f"the last stage does not go backward next, but {following}"
                raise PlanError("action", str(action), reason, f"Put {backward} right behind it")
        if kind is Kind.FORWARD and stage == 0:
            _check_wave(action, under_way)
        elif kind is Kind.BACKWARD and stage == 0:
            del under_way[wave]


def _check_wave(action: Action, under_way: dict[int, int]) -> None:
    """Check that an action may begin its wave's next micro-batch, and note it."""
    if action.wave > 1:
        raise PlanError("action", str(action), "there are two waves", "Put it into wave 0 or 1")
    if action.wave in under_way:
        reason = f"wave {action.wave} still has micro-batch {under_way[action.wave]} under way"
        remedy = f"Put 0B{under_way[action.wave]} before it, or it into the other wave"
        raise PlanError("action", str(action), reason, remedy)
    under_way[action.wave] = action.micro_batch


def _report(plan: Plan, cursors: list[PlanCursor], times: list[list[float]]) -> Report:
    """Put together what the cursors and the execution in ticks have found."""
    ends = [
        [end for end, action in zip(rank, actions, strict=True) if action.kind in COMPUTE]
        for rank, actions in zip(times, plan.ranks, strict=True)
    ]
    ticks = round(max(rank[-1] for rank in ends))
    sends = [action.kind for cursor in cursors for sent in cursor.sent.values() for action in sent]
    return Report(
        schedule=plan.schedule,
        num_stages=plan.num_stages,
        micro_batches=plan.micro_batches,
        num_steps=plan.num_steps,
        actions=tuple(map(len, plan.ranks)),
        peak_activations=tuple(cursor.peak if plan.num_steps else 0 for cursor in cursors),
        staleness=tuple(
            tuple(s for _, s in sorted(cursor.staleness.items())) for cursor in cursors
        ),
        ticks=ticks,
        idle_ticks=tuple(ticks - len(rank) for rank in ends),
        messages=Counter(sends),
    )


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
