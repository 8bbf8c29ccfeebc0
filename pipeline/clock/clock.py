# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on the clock without computing anything, or shows how its ranks wait in a circle."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from wavemare.errors import PlanError
from wavemare.pipeline.plan.plan import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Message,
    Plan,
    message_of,
)

_Operation = Callable[[Action, float], float | None]
"""Takes an action and the time at which it starts; gives that of its end, or None if it waits."""

_Latency = Callable[[int], float]


def execute(
    plan: Plan,
    duration: Callable[[Kind, int], float],
    latency: _Latency,
) -> list[list[float]]:
    """Run a plan: every rank in its order, each action as soon as it can.

    A send costs its rank nothing while fewer than `Plan.send_slots` messages to its receiver are
    unreceived, else it waits. A rank may receive in another order than its sender's. The ranks'
    norms end together. The result does not depend on the order in which ranks are looked at: each
    rank waits for one thing at a time.

    Args:
        plan: What the ranks do.
        duration: Time that an action of a kind takes on a stage, messages left aside.
        latency: Time between a message's start and its arrival, by the sending stage.

    Returns:
        For each rank the times at which its actions end. Each begins where the one before ended.

    Raises:
        PlanError: Ranks wait for each other, or for what never comes.
    """
    times = _times(plan, plan.send_slots, duration, latency)
    if not _has_ended(plan, times):
        raise _stuck(plan, [len(done) for done in times])
    return times


def fewest_slots(plan: Plan) -> int:
    """Return the smallest number of `Plan.send_slots` with which a plan ends.

    Raises:
        PlanError: It ends with no number.
    """
    most = 1 + max(sum(action.kind in SENDS for action in actions) for actions in plan.ranks)
    slots = 1
    while not _ends(plan, slots):
        if slots == 1:
            execute(replace(plan, send_slots=most), _no_time, _no_latency)
        slots += 1
    return slots


def _no_time(kind: Kind, stage: int) -> float:
    return 0.0


def _no_latency(stage: int) -> float:
    return 0.0


def _ends(plan: Plan, slots: int) -> bool:
    return _has_ended(plan, _times(plan, slots, _no_time, _no_latency))


def _has_ended(plan: Plan, times: Sequence[Sequence[float]]) -> bool:
    return all(len(done) == len(actions) for done, actions in zip(times, plan.ranks, strict=True))


def _ranks_of(plan: Plan) -> dict[int, int]:
    """Return the rank of each stage that does something."""
    return {stage: r for r, actions in enumerate(plan.ranks) for stage in {a[1] for a in actions}}


def _times(
    plan: Plan, slots: int, duration: Callable[[Kind, int], float], latency: _Latency
) -> list[list[float]]:
    """Return for each rank the ends of its actions, up to the one that waits for ever."""
    ranks = _ranks_of(plan)
    ready = deque(range(len(plan.ranks)))
    channels: dict[tuple[int, int], _Channel] = {}
    norms = Counter(a.micro_batch for row in plan.ranks for a in row if a.kind is Kind.NORM)
    joined: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def channel(sender: int, receiver: int) -> _Channel:
        ends = sender, receiver
        return channels.setdefault(ends, _Channel(slots, latency, ends, ready))

    def sum_norms(action: Action, clock: float) -> float | None:
        times, complete = joined[action.micro_batch], norms[action.micro_batch]
        rank = ranks[action.stage]
        if rank not in times:
            times[rank] = clock
            if len(times) == complete:
                ready.extend(times)
        return max(times.values()) if len(times) == complete else None

    def operation(kind: Kind, stage: int) -> _Operation:
        if kind in SENDS:
            return channel(ranks[stage], ranks.get(stage + SENDS[kind][1], -1)).send
        if kind in RECEIVES:
            # A stage that is on no rank never sends.
            return channel(ranks.get(stage + RECEIVES[kind][1], -1), ranks[stage]).receive
        if kind is Kind.NORM:
            return sum_norms
        cost = duration(kind, stage)
        return lambda _, clock: clock + cost

    kinds = {action[:2] for actions in plan.ranks for action in actions}
    operations = {(kind, stage): operation(kind, stage) for kind, stage in kinds}
    times: list[list[float]] = [[] for _ in plan.ranks]
    while ready:
        rank = ready.popleft()
        _advance(plan.ranks[rank], times[rank], operations)
    return times


def _advance(
    actions: tuple[Action, ...],
    times: list[float],
    operations: Mapping[tuple[Kind, int], _Operation],
) -> None:
    """Do a rank's actions up to the first that must wait."""
    clock = times[-1] if times else 0
    for position in range(len(times), len(actions)):
        action = actions[position]
        end = operations[action[:2]](action, clock)
        if end is None:
            return
        times.append(end)
        clock = end


class _Channel:
    """The messages from one rank to another, with their times.

    Ranks that need not wait any more are put into ``ready``.
    """

    def __init__(
        self, slots: int, latency: _Latency, ends: tuple[int, int], ready: deque[int]
    ) -> None:
        self.slots = slots
        self.latency = latency
        self.sender, self.receiver = ends
        self.ready = ready
        self.num_sent = 0
        self.pending: dict[Message, float] = {}  # when each was sent
        self.received: list[float] = []
        self.sender_waits = False
        self.receiver_waits = False

    def send(self, action: Action, clock: float) -> float | None:
        """Start a message at a time; return when its sender can go on."""
        blocking = self.num_sent - self.slots
        if blocking >= 0:
            if blocking >= len(self.received):
                self.sender_waits = True
                return None
            clock = max(clock, self.received[blocking])
        self.pending[message_of(action)] = clock
        self.num_sent += 1
        if self.receiver_waits:
            self.receiver_waits = False
            self.ready.append(self.receiver)
        return clock

    def receive(self, action: Action, clock: float) -> float | None:
        """Take a message from a time on; return when it is there."""
        message = message_of(action)
        if message not in self.pending:
            self.receiver_waits = True
            return None
        clock = max(clock, self.pending.pop(message) + self.latency(message[1]))
        self.received.append(clock)
        if self.sender_waits:
            self.sender_waits = False
            self.ready.append(self.sender)
        return clock


def _stuck(plan: Plan, positions: Sequence[int]) -> PlanError:
    """Return the error that shows where every stuck rank stands, and who waits in a circle."""
    ranks = _ranks_of(plan)
    awaited = {
        rank: _awaited(plan, ranks, rank, positions)
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


def _awaited(plan: Plan, ranks: Mapping[int, int], rank: int, positions: Sequence[int]) -> Action:
    """Return the other rank's action for which the next action of a rank waits."""
    actions, position = plan.ranks[rank], positions[rank]
    action = actions[position]
    if action.kind in RECEIVES:
        return Action(*message_of(action))
    if action.kind is Kind.NORM:
        for row, done in zip(plan.ranks, positions, strict=True):
            norms = [a for a in row if a.kind is Kind.NORM]
            begun = {(a.kind, a.micro_batch) for a in row[: done + 1]}
            if norms and (action.kind, action.micro_batch) not in begun:
                return action._replace(stage=norms[0].stage, version=-1)
    receiver = ranks.get(action.stage + SENDS[action.kind][1], -1)
    sends = [a for a in actions[: position + 1] if a.kind in SENDS]
    sends = [a for a in sends if ranks.get(a.stage + SENDS[a.kind][1], -1) == receiver]
    received = plan.ranks[receiver][: positions[receiver]] if receiver >= 0 else ()
    taken = {message_of(a) for a in received if a.kind in RECEIVES}
    blocking = next(a for a in sends if message_of(a) not in taken)
    kind, distance = SENDS[blocking.kind]
    return blocking._replace(kind=kind, stage=blocking.stage + distance, version=-1)


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
