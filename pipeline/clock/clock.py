# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on the clock without computing anything, or shows how its ranks wait in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import add

from wavemare.errors import PlanError
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action, Kind, Plan

_Operation = Callable[[float], float | None]
"""Takes the time at which an action starts; gives that of its end, or None where it must wait."""


def execute(
    plan: Plan,
    duration: Callable[[Kind, int], float],
    latency: Callable[[int], float],
) -> list[list[float]]:
    """Run a plan: every rank in its order, each action as soon as it can.

    With `Plan.send_slots` a send costs its rank nothing while fewer than so many messages of its
    direction are unreceived, else it waits. Without slots it waits for its receive, and both end
    when the message has arrived. The result does not depend on the order in which ranks are
    looked at: each rank waits for one thing at a time.

    Args:
        plan: What the ranks do.
        duration: Time that an action of a kind takes on a stage, messages left aside.
        latency: Time between a message's start and its arrival, by the sending stage.

    Returns:
        For each rank the times at which its actions end. Each begins where the one before ended.

    Raises:
        PlanError: Ranks wait for each other, or for what never comes.
    """
    ranks = _rank_of(plan)
    ready = deque(range(len(plan.ranks)))
    channels: dict[tuple[int, int], _Channel] = {}
    for stage in ranks:
        for step in (1, -1):
            ends = ranks[stage], ranks.get(stage + step, -1)
            kind = _Channel if plan.send_slots else _Rendezvous
            channels[stage, step] = kind(plan.send_slots, latency(stage), ends, ready)
    tables = [
        {
            (kind, stage): _operation(kind, stage, channels, duration)
            for stage in {action.stage for action in actions}
            for kind in Kind
        }
        for actions in plan.ranks
    ]
    times: list[list[float]] = [[] for _ in plan.ranks]
    while ready:
        rank = ready.popleft()
        _advance(plan.ranks[rank], times[rank], tables[rank])
    if any(len(done) < len(actions) for done, actions in zip(times, plan.ranks, strict=True)):
        raise _stuck(plan, ranks, [len(done) for done in times])
    return times


def _advance(
    actions: tuple[Action, ...],
    times: list[float],
    operations: Mapping[tuple[Kind, int], _Operation],
) -> None:
    """Do a rank's actions up to the first that must wait."""
    clock = times[-1] if times else 0
    for position in range(len(times), len(actions)):
        end = operations[actions[position][:2]](clock)
        if end is None:
            return
        times.append(end)
        clock = end


class _Channel:
    """The messages of one direction from one stage to its neighbour, with their times.

    Ranks that need not wait any more are put into ``ready``.
    """

    def __init__(
        self, slots: int, latency: float, ends: tuple[int, int], ready: deque[int]
    ) -> None:
        self.slots = slots
        self.latency = latency
        self.sender, self.receiver = ends
        self.ready = ready
        self.sent: list[float] = []
        self.received: list[float] = []
        self.sender_waits = False
        self.receiver_waits = False

    def send(self, clock: float) -> float | None:
        """Start a message at a time; return when its sender can go on."""
        blocking = len(self.sent) - self.slots
        if blocking >= 0:
            if blocking >= len(self.received):
                self.sender_waits = True
                return None
            clock = max(clock, self.received[blocking])
        self.sent.append(clock)
        self._wake_receiver()
        return clock

    def receive(self, clock: float) -> float | None:
        """Take the next message from a time on; return when it is there."""
        number = len(self.received)
        if number == len(self.sent):
            self.receiver_waits = True
            return None
        clock = max(clock, self.sent[number] + self.latency)
        self.received.append(clock)
        self._wake_sender()
        return clock

    def _wake_sender(self) -> None:
        if self.sender_waits:
            self.sender_waits = False
            self.ready.append(self.sender)

    def _wake_receiver(self) -> None:
        if self.receiver_waits:
            self.receiver_waits = False
            self.ready.append(self.receiver)


class _Rendezvous(_Channel):
    """The same without slots: a message starts when both ranks have come to it."""

    def __init__(
        self, slots: int, latency: float, ends: tuple[int, int], ready: deque[int]
    ) -> None:
        super().__init__(slots, latency, ends, ready)
        self.completed = 0

    def send(self, clock: float) -> float | None:
        if len(self.sent) == self.completed:
            self.sent.append(clock)
            self._wake_receiver()
        if len(self.received) == self.completed:
            self.sender_waits = True
            return None
        self.completed += 1
        return self.received[-1]

    def receive(self, clock: float) -> float | None:
        number = len(self.received)
        if number == len(self.sent):
            self.receiver_waits = True
            return None
        clock = max(clock, self.sent[number]) + self.latency
        self.received.append(clock)
        self._wake_sender()
        return clock


def _operation(
    kind: Kind,
    stage: int,
    channels: Mapping[tuple[int, int], _Channel],
    duration: Callable[[Kind, int], float],
) -> _Operation:
    if kind in SENDS:
        return channels[stage, SENDS[kind][1]].send
    if kind in RECEIVES:
        step = RECEIVES[kind][1]
        channel = channels.get((stage + step, -step))
        # A stage that is on no rank never sends.
        return channel.receive if channel is not None else lambda _: None
    return partial(add, duration(kind, stage))


def _rank_of(plan: Plan) -> dict[int, int]:
    return {action.stage: rank for rank, actions in enumerate(plan.ranks) for action in actions}


def _stuck(plan: Plan, ranks: Mapping[int, int], positions: list[int]) -> PlanError:
    """Return the error that shows where every stuck rank stands, and who waits in a circle."""
    awaited = {
        rank: _awaited(plan, rank, position)
        for rank, position in enumerate(positions)
        if position < len(plan.ranks[rank])
    }
    lines = []
    for rank, target in awaited.items():
        actions, position = plan.ranks[rank], positions[rank]
        before = " ".join(map(str, actions[max(0, position - 3) : position + 1]))
        after = " ".join(map(str, actions[position + 1 : position + 4]))
        lines.append(f"  rank {rank}: {before} <-- waits for {target}; then {after or 'nothing'}")
    circle = _circle({rank: ranks.get(target.stage, -1) for rank, target in awaited.items()})
    if circle:
        cause = f"ranks {', '.join(map(str, circle))} wait for each other in a circle"
    else:
        cause = "a rank waits for what never comes"
    reason = "\n".join(["it never ends, as its ranks come no further than here", *lines, cause])
    remedy = "Change the order of these actions, or give more send_slots"
    return PlanError("plan", plan.schedule, reason, remedy)


def _awaited(plan: Plan, rank: int, position: int) -> Action:
    """Return the neighbour's action for which the action at a position of a rank waits."""
    actions = plan.ranks[rank]
    kind, stage, micro_batch, _, wave = actions[position]
    if kind in RECEIVES:
        send, step = RECEIVES[kind]
        return Action(send, stage + step, micro_batch, wave=wave)
    step = SENDS[kind][1]
    sends = [
        action
        for action in actions[: position + 1]
        if action.stage == stage and action.kind in SENDS and SENDS[action.kind][1] == step
    ]
    blocking = sends[-1 - plan.send_slots]
    receive, _ = SENDS[blocking.kind]
    return Action(receive, stage + step, blocking.micro_batch, wave=blocking.wave)


def _circle(waits_for: Mapping[int, int]) -> list[int]:
    """Return the first circle among ranks of which each waits for one other, or nothing."""
    for start in waits_for:
        path = [start]
        while path[-1] in waits_for:
            following = waits_for[path[-1]]
            if following in path:
                return sorted(path[path.index(following) :])
            path.append(following)
    return []
